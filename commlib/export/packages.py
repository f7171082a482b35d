"""AOTInductor packages, with the members of the program's rings; a capture takes them whole."""

import itertools
import os
import weakref
from typing import Any, NoReturn, Protocol

import torch

from commlib.core.modes import depth, is_tracing
from commlib.core.tensors import has_memory
from commlib.errors import ArgumentError
from commlib.export import rings
from commlib.ops.registered.library import register

Tensors = list[torch.Tensor]

_KEY = "commlib_rings"  # in the metadata of the package
_METADATA = "aot_inductor.metadata"
_numbers = itertools.count()
_loaded: "weakref.WeakValueDictionary[int, _Loader]" = weakref.WeakValueDictionary()


class Package(Protocol):
    """A loaded package as programs use it: torch's ``AOTICompiledModel``, whose import is slow."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program with the arguments of the model that was exported."""

    def get_metadata(self) -> dict[str, str]:
        """Return what was stored with the program."""

    def get_constant_fqns(self) -> list[str]:
        """Return the names of the parameters and buffers."""

    def load_constants(
        self,
        constants_map: dict[str, torch.Tensor],
        *,
        check_full_update: bool,
        user_managed: bool = False,
    ) -> None:
        """Replace parameters and buffers by those of a map.

        Args:
            constants_map: The tensors by their names.
            check_full_update: Whether all of them must be in the map.
            user_managed: Use the tensors themselves, which the caller keeps alive.
        """


def aoti_compile_and_package(
    program: torch.export.ExportedProgram,
    *,
    package_path: str | os.PathLike[str] | None = None,
    inductor_configs: dict[str, Any] | None = None,
) -> str:
    """Compile an exported program with AOTInductor into one file, which records its rings.

    Needs a C++ compiler. Export the program under ``torch.no_grad()``.

    Args:
        program: What ``torch.export.export`` returned.
        package_path: The file; its name ends in ".pt2". Default: a file in Inductor's cache.
        inductor_configs: As for ``torch._inductor.aoti_compile_and_package``.

    Returns:
        The path of the file.

    Raises:
        RingError: The program calls a ring that does not exist on this rank.
        ArgumentError: The program writes to its buffers or inputs, or calls a collective in a
            branch of ``torch.cond`` or the body of a loop.
    """
    _check_branches(program)
    _check_writes(program)
    configs = dict(inductor_configs or {})
    configs[_METADATA] = {**configs.get(_METADATA, {}), _KEY: rings.describe(program)}
    path = torch._inductor.aoti_compile_and_package(
        program,
        package_path=None if package_path is None else os.fspath(package_path),  # no Path there
        inductor_configs=configs,
    )
    return os.fspath(path)


def aoti_load_package(
    path: str | os.PathLike[str],
    run_single_threaded: bool = False,
    device_index: int = -1,
    *,
    ranks: rings.Members | None = None,
) -> Package:
    """Load what ``aoti_compile_and_package`` wrote, and compare the rings; nothing is launched.

    Args:
        path: The file.
        run_single_threaded: As for ``torch._inductor.aoti_load_package``. On a GPU,
            ``commlib.graph.capture`` and CUDA graphs need True.
        device_index: The GPU; default: the current one.
        ranks: Expected members of a ring, by its id, in place of those of the export. For a copy
            of the program on other ranks. As many as at the export.

    Returns:
        torch's ``AOTICompiledModel``. Call it as the model that was exported.

    Raises:
        RingError: A ring of the program does not exist on this rank, or has other members.
        ArgumentError: The file does not record its rings, or ``ranks`` does not fit.
    """
    model: Any = torch._inductor.aoti_load_package(path, run_single_threaded, device_index)
    rings.check(path, rings.read(path, model.get_metadata().get(_KEY, "")), ranks)
    model.loader = _Loader(model.loader)
    package: Package = model
    return package


def _check_branches(program: torch.export.ExportedProgram) -> None:
    """Reject a collective in a branch or a loop, which torch can't lower for AOTInductor."""
    for number in rings.in_branches(program):
        raise ArgumentError(
            f"aoti_compile_and_package: the program calls a collective of ring {number} in a "
            f"branch of torch.cond or in a loop; expected collectives outside of these; call it in "
            f"every case and choose among the results, or use commlib.export.save"
        )


def _check_writes(program: torch.export.ExportedProgram) -> None:
    """Reject a program that writes to buffers or inputs: the writes would be lost silently."""
    signature = program.run_decompositions({}).graph_signature  # which makes writes outputs
    written = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    if written:
        raise ArgumentError(
            f"aoti_compile_and_package: the program writes to {written}; AOTInductor drops writes "
            f"of programs with ordered ops, and no capture sees them; return the new values "
            f"instead, or use commlib.export.save"
        )


class _Loader:
    """The loader of a package: one registered op where a dispatch mode watches.

    A capture learns from operators which memory is read and made. The generated code of a package
    calls none, but for its collectives.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._number = next(_numbers)
        _loaded[self._number] = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def boxed_run(self, inputs: Tensors) -> Tensors:
        """Run the program; takes the tensors out of ``inputs``."""
        if not depth() and not is_tracing() and all(map(has_memory, inputs)):
            return self.run_unwatched(inputs)
        results: Tensors = _operator(inputs, self._number)
        return results

    def run_unwatched(self, inputs: Tensors) -> Tensors:
        """Run the program also where a dispatch mode watches."""
        results: Tensors = self._loader.boxed_run(inputs)
        return results


def _run(inputs: Tensors, package: int) -> Tensors:
    runner = _loaded.get(package)
    if runner is None:
        raise ArgumentError("this AOTInductor package was freed; keep the loaded model")
    return runner.run_unwatched(list(inputs))


def _fake(inputs: Tensors, package: int) -> NoReturn:
    raise ArgumentError(
        "an AOTInductor package can't be traced: its shapes are known when it runs; trace the "
        "model that was exported"
    )


_operator = register(
    "run_package(Tensor[] inputs, int package) -> Tensor[]", _run, _fake, ordered=False
)
