"""Compiles kernels by numba: into one shared library that needs libm alone, or in the memory of this process.

    python -m sepsa.compiled.build [FOLDER] [--missing]

The library has, of each kernel, the native function that numba makes: everything else of numba's module becomes
internal, and LLVM removes what nothing calls, which are all ways to errors that need Python. A function in C calls each
native one, and returns its value, or the smallest integer where it has a status. Nothing else in sepsa imports numba.
`--missing` builds none where there is one of these sources.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sepsa.compiled import library
from sepsa.compiled.kernels import GENERATED, KERNELS, PARTS, Function

# The processors that a library serves: any that has what this name stands for.
LEVELS = {"x86_64": "x86-64-v3", "aarch64": "generic", "arm64": "apple-m1"}
LEVEL = LEVELS.get(platform.machine(), "")
if __name__ == "__main__":  # numba reads them when it is imported
    os.environ |= {"NUMBA_CPU_NAME": LEVEL, "NUMBA_CPU_FEATURES": "", "NUMBA_DISABLE_INTEL_SVML": "1"}

import llvmlite.binding as llvm  # type: ignore[import-untyped]  # noqa: E402
import numba  # noqa: E402
from llvmlite import ir  # noqa: E402
from numba import types  # noqa: E402
from numba.core import cgutils  # noqa: E402
from numba.core.ccallback import CFunc  # noqa: E402
from numba.core.codegen import JITCodeLibrary  # noqa: E402
from numba.core.compiler import Compiler  # noqa: E402
from numba.core.compiler_lock import global_compiler_lock  # noqa: E402
from numba.core.registry import cpu_target  # noqa: E402
from numba.extending import intrinsic  # noqa: E402
from numba.np.arrayobj import populate_array  # noqa: E402
from numba.np.numpy_support import from_dtype  # noqa: E402

# The order of sums may change; NaN and Inf keep their meaning: a diverged body is recognized by them.
OPTIONS: Any = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy", "nogil": True}
SIGNATURE = types.int64(types.CPointer(types.int64), types.int64)
_WORD = ir.IntType(64)
_prepared: dict[Any, Any] = {}  # what numba has for each function and object that kernels call
_kept: list[CFunc] = []  # whose code is in memory

# ---------------------------------------------------------------------- what kernels call


class PartLibrary(JITCodeLibrary):
    """The code of a function that only kernels call: it is optimized and translated inside each of them, not before."""

    def finalize(self) -> None:
        for each in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(each._reload_init)
            self._final_module.link_in(each._get_module_for_linking(), preserve=True)
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0

    @property
    def codegen(self) -> Any:
        """Without machine code there is no place for an environment, by which code would reach Python objects."""
        return _NoEnvironment


class _NoEnvironment:
    @staticmethod
    def set_env(name: str, environment: Any) -> None:
        pass


class PartCompiler(Compiler):
    """Numba's compiler for such functions: half of the time that compilation takes would go into code never called."""

    def define_pipelines(self) -> Any:
        self.state.library = PartLibrary(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        return super().define_pipelines()


PART: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": PartCompiler}


def prepare() -> None:
    """Tell numba of every function and object that kernels call and that it does not know."""
    context = cpu_target.typing_context
    context.refresh()
    for function, inline in PARTS.items():
        if function not in _prepared:
            compiler: Any = numba.njit(**OPTIONS, **PART, forceinline=inline)
            part = _prepared[function] = compiler(function)
            context.insert_global(function, types.Dispatcher(part))
    for thing, kind in GENERATED.items():
        if thing not in _prepared:
            made = _prepared[thing] = CODE[kind](thing)
            context.refresh()
            context.insert_global(thing, context.resolve_value_type(made))


def compile_kernel(function: Function) -> Any:
    """What numba makes of a kernel."""
    compiled: Any = CFunc(function, (SIGNATURE.args, SIGNATURE.return_type), {}, {"nopython": True} | OPTIONS)
    with global_compiler_lock:
        prepare()
        result = compiled._compile_uncached()
        result.library._ensure_finalized()
        return compiled, result


def compile_in_memory(function: Function) -> int:
    """Compile a kernel in this process; returns its address."""
    with global_compiler_lock:
        compiled, result = compile_kernel(function)
        _kept.append(compiled)
        return int(result.library.get_pointer_to_function(result.fndesc.llvm_cfunc_wrapper_name))


# ---------------------------------------------------------------------- the code of generated objects


def _views(views: Any) -> Any:
    """The code of several parts."""

    @intrinsic(prefer_literal=True)
    def found(typing: Any, names: Any, model: Any, copy: Any = None) -> Any:
        given = (model, copy)[: 1 + views.group.repeated]
        parts = [_callee(typing, getattr(views.group, name), given) for name in names.literal_value.split()]
        result = types.Tuple([signature.return_type for _, signature in parts])

        def code(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            own = arguments[1 : 1 + len(given)]
            return context.make_tuple(builder, result, [context.get_function(*part)(builder, own) for part in parts])

        return result(names, model, copy or types.Omitted(None)), code

    return found


def _record(view: Any) -> Any:
    """The code of a record, which is a pointer and so cannot be what a function returns."""

    @intrinsic
    def found(typing: Any, model: Any, copy: Any = None) -> Any:
        record, given = from_dtype(view.dtype), (model, copy)[: 1 + view.repeated]
        address = _callee(typing, view.address, given)

        def code(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            found = context.get_function(*address)(builder, arguments[: len(given)])
            return builder.inttoptr(found, context.get_value_type(record))

        return record(model, copy or types.Omitted(None)), code

    return found


def _callee(typing: Any, function: Any, arguments: Any) -> Any:
    """The types of a function that generated code calls, and of the call."""
    kind = typing.resolve_value_type(function)
    return kind, kind.get_call_type(typing, arguments, {})


def _call(_: Any) -> Any:
    """The code of a call by an address."""

    @intrinsic
    def call(_: Any, address: Any, model: Any, index: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            function = ir.FunctionType(_WORD, [_WORD.as_pointer(), _WORD]).as_pointer()
            return builder.call(builder.inttoptr(arguments[0], function), arguments[1:])

        return types.int64(types.int64, model, types.int64), code

    return call


def _array_at(_: Any) -> Any:
    """The code of the array at an address."""

    @intrinsic
    def array_at(_: Any, address: Any, shape: Any, dtype: Any) -> Any:
        array = types.Array(dtype.dtype, len(shape), "C")

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            itemsize = context.get_abi_sizeof(context.get_data_type(array.dtype))
            strides: list[Any] = []
            step, sizes = ir.Constant(_WORD, itemsize), cgutils.unpack_tuple(builder, arguments[1])
            for size in reversed(sizes):
                strides.insert(0, step)
                step = builder.mul(step, size)
            made = context.make_array(array)(context, builder)
            data = builder.inttoptr(arguments[0], context.get_data_type(array.dtype).as_pointer())
            steps = cgutils.pack_array(builder, strides)
            populate_array(made, data, cgutils.pack_array(builder, sizes), steps, ir.Constant(_WORD, itemsize), None)
            return made._getvalue()

        return array(types.int64, types.UniTuple(types.int64, len(shape)), dtype), code

    return array_at


CODE = {"array": _array_at, "call": _call, "record": _record, "views": _views}

# ---------------------------------------------------------------------- the library

# The processor is asked before any other function is called; these lines are compiled for every one.
BEGIN = """#include <stdint.h>
#define API __attribute__((visibility("default")))
API int sepsa_processor(void) {{ return {processor}; }}
void NRT_MemInfo_call_dtor(void *array) {{}}  // frees an array that numba counts, and kernels have none
"""
FRAME = """API int sepsa_frame_{name}(void) {{ return {names}; }}
"""
SHIM = """int {native}(int64_t *, void **, void *, int64_t);
API int64_t {name}(void *model, int64_t n)
{{ int64_t value = 0; void *error = 0; return {native}(&value, &error, model, n) ? INT64_MIN : value; }}
"""
# What a library may need: libm's functions, and what compilers call to copy and fill memory.
ALLOWED = re.compile(
    r"_*(a?(sin|cos|tan)h?|sincos|atan2|exp[2m]?1?|log[2p]?(10)?1?|pow|sqrt|cbrt|hypot|fmod|floor|ceil|rint|trunc|round"
    r"|nearbyint|ldexp|frexp|copysign|fmax|fmin|fma|erfc?|[lt]gamma|bzero|memset(_pattern16)?|mem(cpy|move|cmp)"
    r"|cxa_finalize|stack_chk_fail|ITM_(de)?registerTMCloneTable|gmon_start__|dyld_stub_binder|cpu_model)f?(@.*)?"
)


def machine() -> Any:
    """What LLVM makes code for: any processor of the level."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(cpu=LEVEL, features="", opt=3, reloc="pic", codemodel="small")


def write_object(function: Function, machine: Any, path: Path) -> str:
    """Write an object file with a kernel's native function; returns the name of that."""
    _, result = compile_kernel(function)
    module, native = llvm.parse_bitcode(result.library._final_module.as_bitcode()), f"{KERNELS[function]}_native"
    compiled = module.get_function(result.fndesc.mangled_name)
    compiled.name, compiled.visibility = native, "hidden"  # numba's names count what was compiled before
    for each in (*module.functions, *module.global_variables):
        if not each.is_declaration and each.name != native:
            each.linkage = "internal"
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    path.write_bytes(machine.emit_object(module))
    if more := needs(path, "-u"):
        name = f"{function.__module__}.{function.__qualname__}"
        raise SystemExit(f"the kernel {name} calls what neither libm nor libc has: {', '.join(more)}")
    return native


def build(folder: Path) -> Path:
    """Build the library of all kernels into a folder; returns its file."""
    if not LEVEL:
        raise SystemExit(
            f"there are no libraries for the processor {platform.machine()!r}: kernels are compiled by numba"
        )
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise SystemExit("a library of kernels needs a C compiler, and there is no `cc`: install one, or set CC")
    sources = library.digest()
    for name in library.DEFINING:
        importlib.import_module(name)
    target = machine()
    shims = [BEGIN.format(processor=f'__builtin_cpu_supports("{LEVEL}") != 0' if LEVEL.startswith("x86") else 1)]
    found = {each.group.frame for each, kind in GENERATED.items() if kind == "views"}
    frames = sorted(found, key=lambda frame: frame.__name__)
    shims += [FRAME.format(name=frame.__name__, names=library.checksum(frame.positions)) for frame in frames]
    with tempfile.TemporaryDirectory() as scratch:
        objects = []
        for number, (function, name) in enumerate(sorted(KERNELS.items(), key=lambda item: item[1]), 1):
            objects.append(Path(scratch, f"{number}.o"))
            shims.append(SHIM.format(native=write_object(function, target, objects[-1]), name=name))
            show(f"{number} of {len(KERNELS)} kernels")
        shim, made = Path(scratch, "shim.c"), Path(scratch, "library")
        shim.write_text("".join(shims))
        command = [compiler, "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-x", "-o", made]
        subprocess.run([*map(str, (*command, shim, *objects, "-lm"))], check=True)
        if more := needs(made, *(["-D", "-u"] if sys.platform == "linux" else ["-u"])):
            raise SystemExit(f"the library would need more than libm and libc have: {', '.join(more)}")
        if library.digest() != sources:
            raise SystemExit("the sources of the kernels changed while they were compiled: build them again")
        return library.store(made.read_bytes(), folder)


def needs(path: Path, *options: str) -> list[str]:
    """What a file needs, by `nm` with these options, beyond libm, and what compilers take from libc."""
    listed = subprocess.run(["nm", *options, path], capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split() if len(name) > 1 and "NRT_MemInfo_call_dtor" not in name]  # in `BEGIN`
    return [name for name in names if not ALLOWED.fullmatch(name)]


def show(text: str) -> None:
    """Write how far the build is, where somebody looks."""
    if sys.stderr.isatty():
        print(f"\r{text} ", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    arguments = [each for each in sys.argv[1:] if each != "--missing"]
    present, _ = library.find() if "--missing" in sys.argv else (None, "")
    path = present or build(Path(*arguments) if arguments else library.FOLDER)
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
