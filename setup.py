"""Builds the part in C, where a compiler is there; everything else about the package is in pyproject.toml."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

WITHOUT = (
    "cachestream is installed without its part in C: all of it works, but what moves rows into batches shares the "
    "interpreter with the training loop. To have it built, install a C compiler and Python's headers (Debian: "
    "apt-get install gcc libc6-dev python3-dev), then install cachestream again."
)


def extension(name: str) -> Extension:
    """Return the extension module `name`, whose source is the file of that name."""
    return Extension(
        name,
        [name.replace(".", "/") + ".c"],
        extra_compile_args=["-std=c11", "-O3", "-Wall", "-Wextra", "-pthread"],
        # auditwheel refuses what is not linked to a C library, also where it needs none.
        extra_link_args=["-pthread", "-Wl,--no-as-needed"],
        py_limited_api=True,
        optional=True,
    )


EXTENSIONS = [extension("cachestream.training.batches._gather")]


class BuildWhatCanBe(build_ext):
    """Says what is lost where nothing could be built, and leaves nothing of an earlier build in its place."""

    def run(self) -> None:
        super().run()
        failed = [path for path in self.get_outputs() if not Path(path).exists()]
        if failed:
            for path in dict(self.get_output_mapping()).values():
                Path(path).unlink(missing_ok=True)
            self.distribution.ext_modules = None
            self.warn(WITHOUT)


class TellWhatIsThere(bdist_wheel):
    """Builds before the wheel gets its tag: without its part in C it is a wheel for every Python and machine."""

    def run(self) -> None:
        # What an earlier build left there, of files that are gone by now, would be packed as well.
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        self.run_command("build_ext")
        self.root_is_pure = not self.distribution.has_ext_modules()
        super().run()


# Python without the GIL cannot load what is made for the limited API, and has nothing that it would have to share.
shares_the_interpreter = not sysconfig.get_config_var("Py_GIL_DISABLED")
setup(
    ext_modules=EXTENSIONS if shares_the_interpreter else [],
    cmdclass={"build_ext": BuildWhatCanBe, "bdist_wheel": TellWhatIsThere},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if shares_the_interpreter else {},
)
