"""Findings of `cachestream diagnose`: a line for each stage, the verdict, and what to do next."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from cachestream.config import format_size
from cachestream.tools.diagnose.stages import Stages, Verdict

_WIDTH: Final = 80
_SLOW_LISTING_S: Final = 10.0
_LEAST_S: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Findings:
    """Measurements of `source` (redacted), and the verdict on them; `notes` name what could not be measured.

    `skipped` samples or units could not be used, the first because of `failure`.
    """

    source: str
    stages: Stages
    verdict: Verdict
    notes: tuple[str, ...] = ()
    skipped: int = 0
    failure: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; None for what was not measured, or has no limit."""
        return {
            "source": self.source,
            "verdict": asdict(self.verdict) | {"samples_per_s": _finite(self.verdict.samples_per_s)},
            "samples_per_s": {name: _finite(rate) for name, _, rate, _ in self._rows() if name != "list"},
            "fill_samples_per_s": _finite(self.stages.fill_per_s),
            "stages": asdict(self.stages),
            "skipped": self.skipped,
            "failure": self.failure,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """A table of 80 columns, and sentences."""
        lines = [*self._head(), "", f"{'':10}{'ms a sample':>11}{'samples/s':>12}"]
        for name, each_s, rate, note in self._rows():
            bound = "> " if name == "read" and self.stages.remote_has_more else ""
            shown = f"{bound}{_number(rate)}" if math.isfinite(rate) else ""
            lines.append(f"{name:10}{_number(1000 * each_s):>11}{shown:>12}  {note}")
        return "\n".join([*lines, "", *self._sentences()])

    def _head(self) -> list[str]:
        alone, written, units = self.stages.alone, self.stages.written, self.stages.num_units
        count = "endless" if units is None else f"{units:,} units"
        count += " and more" if self.stages.is_listing else ""
        looked = f"{alone.num_samples:,} samples looked at one by one"
        if alone.fetched_bytes:
            looked += f", {format_size(alone.fetched_bytes / alone.num_samples)} fetched for each"
        if written is not None:
            looked += f", {format_size(written.num_bytes / written.num_samples)} cached"
        return [f"{self.source}: {count}", *textwrap.wrap(looked, _WIDTH)]

    def _rows(self) -> Iterator[tuple[str, float, float, str]]:
        """The name of each stage, its seconds a sample, its samples a second, and a note."""
        stages, rates, alone = self.stages, self.stages.rates, self.stages.alone
        yield "list", stages.list_s, math.inf, "once, before the first sample"
        yield "read", stages.read_s / alone.num_samples, rates["read"], self._reading()
        yield "decode", alone.cpu_s["decode"] / alone.num_samples, rates["decode"], f"cores: {stages.cores}"
        if stages.has_transform:
            each_s = alone.wall_s["transform"] / alone.num_samples
            yield "transform", each_s, rates["transform"], f"sampling processes: {stages.workers}"
        yield "pack", alone.cpu_s["pack"] / alone.num_samples, rates["pack"], f"cores: {stages.cores}"
        onto = "no CUDA device" if stages.device == "cpu" else f"onto {stages.device}"
        for name, done, note in (
            ("write", stages.written, "synced"),
            ("transfer", stages.delivered, onto),
        ):
            if done is not None:
                speed = format_size(done.num_bytes / max(done.seconds, _LEAST_S))
                yield name, done.seconds / done.num_samples, rates[name], f"{speed}/s, {note}"

    def _reading(self) -> str:
        alone, run = self.stages.alone, self.stages.together
        if not alone.fetched_bytes or not run.fetched_bytes:
            return f"{run.reads} at once; the source does not tell bytes"
        many, one = run.fetched_bytes / run.seconds, alone.fetched_bytes / max(self.stages.read_s, _LEAST_S)
        return f"{format_size(many)}/s by {run.reads} at once; one alone {format_size(one)}/s"

    def _sentences(self) -> Iterator[str]:
        verdict, stages = self.verdict, self.stages
        because, rate = verdict.because[0].upper() + verdict.because[1:], _number(verdict.samples_per_s)
        yield from _wrapped(f"Verdict: {verdict.binds}. {because}; it lets {rate} samples/s through.")
        steps = verdict.what_next
        if stages.list_s >= _SLOW_LISTING_S:
            steps += (
                f"listing takes {stages.list_s:.0f} s before the first sample: a Manifest, or fewer files",
            )
        for step in steps:
            yield from textwrap.wrap(step, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
        yield ""
        fill, served = _number(stages.fill_per_s), _number(stages.rates["transfer"])
        yield from _wrapped(
            f"A cache fills with up to {fill} samples/s, and what is cached is served with up to {served}: a model that "
            "takes fewer waits for its own compute."
        )
        for note in self.notes:
            yield from _wrapped(note)
        if self.skipped:
            yield from _wrapped(f"{self.skipped:,} skipped, the first because: {self.failure}")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_long_words=False)


def _finite(rate: float) -> float | None:
    return rate if math.isfinite(rate) else None


def _number(value: float) -> str:
    """Three significant digits: "0.52", "31.2", "4,120"."""
    if not math.isfinite(value):
        return "any number of"
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 1000 else f"{value:.3g}"
