"""The findings of `cachestream diagnose`: a line for each stage, the verdict, and what to do next."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from cachestream.config import format_size
from cachestream.tools.diagnose.stages import Stages, Verdict

_WIDTH: Final = 80
_NOTE_WIDTH: Final = 46
_SLOW_LISTING_S: Final = 10.0
_LEAST_S: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Findings:
    """Figures and the verdict on them, of `source` as it may be shown; `folder` is where was written.

    `notes` tell what could not be measured. `skipped` samples or units could not be used, the first for the reason
    `failure`.
    """

    source: str
    stages: Stages
    verdict: Verdict
    folder: str
    notes: tuple[str, ...] = ()
    skipped: int = 0
    failure: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; what was not measured, or has no limit, is None."""
        stages = self.stages
        rates = {name: rate for name, _, rate, _ in self._rows() if name != "list"}
        return {
            "source": self.source,
            "verdict": asdict(self.verdict) | {"samples_per_s": _finite(self.verdict.samples_per_s)},
            "samples_per_s": {name: _finite(rate) for name, rate in rates.items()},
            "fill_samples_per_s": _finite(stages.fill_per_s),
            "stages": asdict(stages) | {"remote_has_more": stages.remote_has_more},
            "skipped": self.skipped,
            "failure": self.failure,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """A table of 80 columns, and sentences."""
        lines = [*self._head(), "", f"{'':10}{'a sample':>11}{'samples/s':>12}"]
        for name, each_s, rate, note in self._rows():
            each = "" if each_s is None else _duration(each_s)
            shown = "" if not math.isfinite(rate) else f"{'> ' if self._is_more(name) else ''}{_number(rate)}"
            first, *more = textwrap.wrap(note, _NOTE_WIDTH) or [""]
            lines.append(f"{name:10}{each:>11}{shown:>12}  {first}")
            lines += [f"{'':35}{line}" for line in more]
        lines += ["", *self._words()]
        return "\n".join(line.rstrip() for line in lines)

    def _is_more(self, name: str) -> bool:
        return name == "read" and self.stages.remote_has_more

    def _head(self) -> list[str]:
        stages = self.stages
        count = "endless" if stages.num_units is None else f"{stages.num_units:,} units"
        count += " and more" if stages.is_listing else ""
        looked = f"{stages.num_samples:,} samples looked at one by one"
        if stages.fetched_bytes:
            looked += f", {format_size(stages.fetched_bytes / stages.num_samples)} fetched for each"
        if stages.written is not None:
            looked += f", {format_size(stages.written.num_bytes / stages.written.num_samples)} cached"
        return [f"{self.source}: {count}", *textwrap.wrap(looked, _WIDTH)]

    def _rows(self) -> Iterator[tuple[str, float | None, float, str]]:
        """Of each stage its name, seconds a sample, samples a second, and what there is to say."""
        stages = self.stages
        count, cores = stages.num_samples, f"on {stages.cores} core{'s' if stages.cores > 1 else ''}"
        yield "list", stages.list_s, math.inf, "once, before the first sample"
        yield "read", stages.read_s / count, stages.read_per_s, self._reading()
        yield "decode", stages.decode_s / count, stages.calculated_per_s("decode"), cores
        if stages.transform_s is not None:
            processes = f"one at a time in {stages.workers} process{'es' if stages.workers > 1 else ''}"
            yield "transform", stages.transform_s / count, stages.transform_per_s, processes
        yield "pack", stages.pack_s / count, stages.calculated_per_s("pack"), cores
        if stages.written is not None:
            written = stages.written
            speed = format_size(written.num_bytes / max(written.seconds, _LEAST_S))
            each_s = written.seconds / written.num_samples
            yield "write", each_s, stages.write_per_s, f"{speed}/s into {self.folder}, synced"
        if stages.delivery is not None:
            sent = stages.delivery
            share = sent.bytes_per_s / sent.memcpy_bytes_per_s
            rate = f"{format_size(sent.bytes_per_s)}/s, {share:.0%} of memcpy, "
            where = "no CUDA device" if sent.device == "cpu" else f"onto {sent.device}"
            yield "transfer", 1 / sent.samples_per_s, sent.samples_per_s, rate + where

    def _reading(self) -> str:
        stages, crowd = self.stages, self.stages.crowd
        at_once = f"{crowd.reads} at once" if crowd.reads > 1 else "one at a time"
        if not stages.fetched_bytes or not crowd.fetched_bytes:
            return f"{at_once}; the source does not tell bytes"
        many, one = crowd.fetched_bytes / crowd.seconds, stages.fetched_bytes / max(stages.read_s, _LEAST_S)
        return f"{format_size(many)}/s by {at_once}; one alone {format_size(one)}/s"

    def _words(self) -> Iterator[str]:
        stages, verdict = self.stages, self.verdict
        rate = _number(verdict.samples_per_s)
        yield from textwrap.wrap(
            f"Verdict: {verdict.binds}. {verdict.because[0].upper()}{verdict.because[1:]}; it lets {rate} samples/s "
            "through.",
            _WIDTH,
        )
        for step in verdict.what_next:
            yield from textwrap.wrap(step, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
        if stages.list_s >= _SLOW_LISTING_S:
            step = f"listing takes {_duration(stages.list_s)} before the first sample: a Manifest, or fewer files"
            yield from textwrap.wrap(step, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
        yield ""
        yield from textwrap.wrap(self._outlook(), _WIDTH)
        for note in self.notes:
            yield from textwrap.wrap(note, _WIDTH)
        if self.skipped:
            yield from textwrap.wrap(
                f"{self.skipped:,} skipped, the first because: {self.failure}", _WIDTH, break_long_words=False
            )

    def _outlook(self) -> str:
        stages = self.stages
        fill = f"A cache fills with up to {_number(stages.fill_per_s)} samples/s"
        if stages.delivery is None:
            return f"{fill}."
        served = _number(stages.delivery.samples_per_s)
        return (
            f"{fill}, and what is cached is served with up to {served}: a model that takes fewer waits for its own "
            "compute."
        )


def _finite(rate: float) -> float | None:
    return rate if math.isfinite(rate) else None


def _number(rate: float) -> str:
    """Three digits that matter: "0.52", "31.2", "4,120"."""
    if not math.isfinite(rate):
        return "any number of"
    if rate >= 1000:
        return f"{float(f'{rate:.3g}'):,.0f}"
    return f"{rate:.3g}"


def _duration(seconds: float) -> str:
    """A time of three digits with its unit: "1.25 s", "31 ms", "8.1 µs"."""
    for unit_s, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= 0.9995 * unit_s:
            return f"{float(f'{seconds / unit_s:.3g}'):g} {unit}"
    return f"{float(f'{seconds * 1e6:.3g}'):g} µs"
