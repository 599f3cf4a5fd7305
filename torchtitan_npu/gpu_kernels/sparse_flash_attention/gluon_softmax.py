"""The softmax of the forward kernel on Hopper GPUs, in which threads rarely exchange numbers.

Exponentials are relative to an *origin* per head: a running maximum that moves only if a block's highest score exceeds
it by more than :data:`MARGIN`. Exponentials are therefore at most ``2 ** MARGIN``, which float16 represents. An origin
rarely moves after a row's first block. Each block's exponentials are computed relative to the former origin, before its
highest score is known. A warp in which an origin moves computes them again.

In an accumulator, four threads share a head, and each has two of every eight adjacent columns. A vector of heads is
therefore (heads, 4): the origin four times, or the maximum or sum of each thread.

Code that runs only if an origin of the warp moves is inline assembly. A branch in Gluon would need all four warps to
agree, which takes longer than multiplying a total by 1. All threads of a warp must reach the assembly together, because
it uses ``vote`` and ``shfl``: do not call it in a branch that some threads may not take.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torchtitan_npu.gpu_kernels.sparse_flash_attention.gluon_tiles import BLOCK_HEADS

MARGIN = gl.constexpr(8.0)
PER_THREAD = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )
)
"""A layout of (64 heads, 4 threads). A thread has two heads, eight apart."""


@gluon.jit
def fill_per_thread(number):
    """Return a vector that is ``number`` for each head and thread."""
    return gl.full([BLOCK_HEADS, 4], number, gl.float32, PER_THREAD)


@gluon.jit
def exponentials_of(scores, scale, origin):
    """Return the exponentials of (64 heads, 64 keys), their origin, and each thread's highest score times ``scale``."""
    by_thread = _split_by_thread(scores)
    highest = gl.convert_layout(gl.max(gl.max(by_thread, 3), 1), PER_THREAD, assert_trivial=True) * scale
    before = gl.where(origin == float("-inf"), 0.0, origin)  # -inf - -inf is NaN
    early = gl.exp2(by_thread * scale - _expand(before, by_thread))
    new_origin = gl.inline_asm_elementwise(
        ORIGIN, ORIGIN_OPERANDS, [origin, highest], dtype=gl.float32, is_pure=True, pack=2
    )
    exponentials = gl.inline_asm_elementwise(
        EXPONENTIALS,
        EXPONENTIALS_OPERANDS,
        [early, by_thread, scale, _expand(origin, by_thread), _expand(new_origin, by_thread)],
        dtype=gl.float32,
        is_pure=True,
        pack=32,
    )
    return _join_threads(exponentials, scores), new_origin, highest


@gluon.jit
def sum_by_thread(block):
    """Add up the columns of each thread, (heads, 4 threads): the threads of a head are added once at a tile's end."""
    sums = gl.sum(gl.sum(_split_by_thread(block), 3), 1)
    return gl.convert_layout(sums, PER_THREAD, assert_trivial=True)


@gluon.jit
def factor_between(before, after):
    """Return the factor that makes exponentials relative to ``before`` relative to ``after``."""
    return gl.where(before == after, 1.0, gl.exp2(before - after))


@gluon.jit
def multiply_rows(block, factor):
    """Multiply the rows of a block by the factors of their heads."""
    by_thread = _split_by_thread(block)
    return _join_threads(by_thread * _expand(factor, by_thread), block)


@gluon.jit
def rescale_total(total, before, after):
    """Make a total of (64 heads, 256 columns) that is relative to ``before`` relative to ``after``."""
    by_thread = _split_by_thread(total)
    rescaled = gl.inline_asm_elementwise(
        RESCALE,
        RESCALE_OPERANDS,
        [by_thread, _expand(before, by_thread), _expand(after, by_thread)],
        dtype=gl.float32,
        is_pure=True,
        pack=128,
    )
    return _join_threads(rescaled, total)


@gluon.jit
def round_like(exponentials, queries):
    """Return ``exponentials`` in the dtype of ``queries``, half precision.

    One instruction converts two numbers. Without assembly, ptxas converts them one by one at a quarter of the rate,
    because they are also added up.
    """
    name: gl.constexpr = "bf16x2" if queries.dtype == gl.bfloat16 else "f16x2"
    assembly: gl.constexpr = "cvt.rn." + name + ".f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(assembly, "=r,r,r", [exponentials], dtype=queries.dtype, is_pure=True, pack=2)


@gluon.jit
def _split_by_thread(block):
    """Return a block of an accumulator as (heads, eights of columns, 4 threads, 2 columns)."""
    return block.reshape([block.shape[0], block.shape[1] // 8, 4, 2])


@gluon.jit
def _join_threads(by_thread, like):
    """Return a block of :func:`_split_by_thread` in the shape and layout of ``like``."""
    return gl.convert_layout(by_thread.reshape(like.shape), like.type.layout, assert_trivial=True)


@gluon.jit
def _expand(vector, by_thread):
    """Return a vector, (heads, 4 threads), so that it broadcasts to a block of :func:`_split_by_thread`."""
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, by_thread.type.layout))
    return gl.convert_layout(vector, layout, assert_trivial=True)[:, None, :, None]


# The assembly depends on the order in which a thread's numbers are packed, that of its registers: two columns of a
# head, two of the head eight rows below, then the next eight columns. So numbers 0 and 2 are of its two heads. Triton
# 3.6 and 3.7 pack in this order, but do not document it. With a later Triton, run test_gpu_sparse_attention_hopper.py
# on a GPU. With "&", no output shares a register with an input that is read later.

# $0, $1: origins. $2, $3: former origins. $4, $5: the thread's highest scores
ORIGIN = gl.constexpr(
    "{ .reg .pred %any, %higher; .reg .f32 %first, %second, %other;"
    " mov.f32 $0, $2; mov.f32 $1, $3;"
    f" add.f32 %other, $2, {MARGIN.value}; setp.gt.f32 %any, $4, %other;"
    f" add.f32 %other, $3, {MARGIN.value}; setp.gt.or.f32 %any, $5, %other, %any;"
    " vote.sync.any.pred %any, %any, 0xffffffff; @!%any bra.uni DONE;"
    " mov.f32 %first, $4; mov.f32 %second, $5;"
    + "".join(
        f" shfl.sync.bfly.b32 %other, {highest}, {distance}, 0x1f, 0xffffffff; max.f32 {highest}, {highest}, %other;"
        for distance in (1, 2)
        for highest in ("%first", "%second")
    )
    + "".join(
        f" add.f32 %other, ${former}, {MARGIN.value}; setp.gt.f32 %higher, {highest}, %other;"
        f" selp.f32 ${former - 2}, {highest}, ${former}, %higher;"
        for former, highest in ((2, "%first"), (3, "%second"))
    )
    + " DONE: }"
)
ORIGIN_OPERANDS = gl.constexpr("=&f,=&f,f,f,f,f")

# $0 to $31: exponentials, and at first those relative to the former origin. $64 to $95: scores. $96: scale.
# $128, $130: former origins. $160, $162: origins
EXPONENTIALS = gl.constexpr(
    "{ .reg .pred %any, %unset; .reg .f32 %first, %second, %other;"
    " setp.neu.f32 %any, $128, $160; setp.neu.or.f32 %any, $130, $162, %any;"
    " vote.sync.any.pred %any, %any, 0xffffffff; @!%any bra.uni DONE;"
    + "".join(
        f" setp.eq.f32 %unset, ${origin}, 0fFF800000; neg.f32 {minus}, ${origin};"
        f" selp.f32 {minus}, 0f00000000, {minus}, %unset;"
        for origin, minus in ((160, "%first"), (162, "%second"))
    )
    + "".join(
        f" fma.rn.f32 %other, ${64 + i}, $96, {'%second' if i & 2 else '%first'}; ex2.approx.ftz.f32 ${i}, %other;"
        for i in range(32)
    )
    + " DONE: }"
)
EXPONENTIALS_OPERANDS = gl.constexpr(",".join(["=&f"] * 32 + [str(i) for i in range(32)] + ["f"] * 128))

# $0 to $127: the total. $256, $258: former origins. $384, $386: origins
RESCALE = gl.constexpr(
    "{ .reg .pred %any, %same; .reg .f32 %first, %second;"
    " setp.neu.f32 %any, $256, $384; setp.neu.or.f32 %any, $258, $386, %any;"
    " vote.sync.any.pred %any, %any, 0xffffffff; @!%any bra.uni DONE;"
    + "".join(
        f" sub.f32 {factor}, ${former}, ${origin}; ex2.approx.ftz.f32 {factor}, {factor};"
        f" setp.eq.f32 %same, ${former}, ${origin}; selp.f32 {factor}, 0f3F800000, {factor}, %same;"
        for former, origin, factor in ((256, 384, "%first"), (258, 386, "%second"))
    )
    + "".join(f" mul.f32 ${i}, ${i}, {'%second' if i & 2 else '%first'};" for i in range(128))
    + " DONE: }"
)
RESCALE_OPERANDS = gl.constexpr(",".join(["=&f"] * 128 + [str(i) for i in range(128)] + ["f"] * 256))
