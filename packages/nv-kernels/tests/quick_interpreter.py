"""Triton's interpreter without the work that it repeats: the same results in a third of the time.

Owns patches of time alone; those of results are in `interpreter`. They are written for the version
of Triton that the workspace pins.
"""

from types import SimpleNamespace

import triton.language as tl
from triton.runtime import interpreter as inner


def quicken_interpreter() -> None:
    """Patch the interpreter; once per process."""
    _patch_the_language_once()
    _look_types_up()
    # It compares each sum of integers with its bounds, but asserts only in debug mode.
    inner.interpreter_builder.options = inner.InterpreterOptions(sanitize_overflow=False)


def _patch_the_language_once() -> None:
    """Replace Triton's functions at the first launch, instead of at each call of a function."""
    patch = inner._patch_lang
    patched = []

    def once(_):
        if not patched:
            patched.append(patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core})))
        return SimpleNamespace(restore=lambda: None)

    inner._patch_lang = once


def _look_types_up() -> None:
    """Keep what is computed from a type: its NumPy dtype, a block's type, a tensor's shape."""
    tensor, block, semantic = tl.tensor, tl.block_type, inner.TritonSemantic
    make_block, broadcast, find = block.__init__, semantic.broadcast_impl_value, inner._get_np_dtype
    blocks, shapes, dtypes = {}, {}, {}

    def numpy_dtype(type_):
        if type_.name not in dtypes:
            dtypes[type_.name] = find(type_)
        return dtypes[type_.name]

    def init_block(self, element_ty, shape):
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])

    def init_tensor(self, handle, type_):
        if type_.name not in shapes:
            sizes = [tl.constexpr(size) for size in (type_.shape if type_.is_block() else ())]
            numel = 1
            for size in sizes:
                numel *= size.value
            shapes[type_.name] = tl.tuple(sizes), tl.constexpr(numel), type_.scalar
        self.handle, self.type = handle, type_
        self.shape, self.numel, self.dtype = shapes[type_.name]

    def broadcast_unequal(self, left, right):
        sizes = [x.type.shape.values if x.type.is_block() else [] for x in (left, right)]
        return (left, right) if sizes[0] == sizes[1] else broadcast(self, left, right)

    inner._get_np_dtype = numpy_dtype
    block.__init__, tensor.__init__ = init_block, init_tensor
    semantic.broadcast_impl_value = broadcast_unequal
