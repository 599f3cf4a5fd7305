"""The softmax of the forward kernel on Hopper GPUs. Threads exchange nothing in it, unless a head's origin moves.

In an accumulator, four threads share a head, and each has two of eight adjacent columns. A vector of heads therefore
has a number for each of these threads, (heads, 4): the origin, four times, or each thread's own maximum or sum.

Exponentials are relative to an origin per head. It moves to a block's highest score if that exceeds it by more than
:data:`MARGIN`. So exponentials stay below ``2 ** MARGIN``, which float16 represents. That a score exceeds it is rare
after a row's first block. So exponentials are computed relative to the former origin, without the block's highest
score. A warp in which a score exceeds it branches to code that finds the highest scores and computes them again.
Both that branch and the one that rescales a total are in assembly: Gluon's need all warps of a group to agree, which
takes longer than a multiplication of the total.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torchtitan_npu.ops.sparse_flash_attention.gluon_tiles import BLOCK_HEADS

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
def of_each_thread(number):
    """Return a vector that is ``number`` for each head and thread."""
    return gl.full([BLOCK_HEADS, 4], number, gl.float32, PER_THREAD)


@gluon.jit
def exponentials_of(scores, scale, origin):
    """Return the exponentials of (64 heads, 64 keys), the origin they are relative to, and the highest scores.

    The highest scores are those of each thread, and are not scaled.
    """
    of_threads = _of_threads(scores)
    highest = gl.convert_layout(gl.max(gl.max(of_threads, 3), 1), PER_THREAD, assert_trivial=True)
    before = gl.where(origin == float("-inf"), 0.0, origin)  # -inf - -inf is NaN
    early = gl.exp2(of_threads * scale - _beside(before, of_threads))
    exponentials, moved = gl.inline_asm_elementwise(
        EXPONENTIALS,
        EXPONENTIALS_OPERANDS,
        [early, of_threads, scale, _beside(origin, of_threads), _beside(highest, of_threads)],
        dtype=[gl.float32, gl.float32],
        is_pure=True,
        pack=32,
    )
    return _as_block(exponentials, scores), _first_of_threads(moved), highest


@gluon.jit
def thread_sums(block):
    """Add up the columns of each thread, (heads, 4 threads): the threads of a head are added once at a tile's end."""
    sums = gl.sum(gl.sum(_of_threads(block), 3), 1)
    return gl.convert_layout(sums, PER_THREAD, assert_trivial=True)


@gluon.jit
def factor_between(before, after):
    """Return the factor that makes exponentials relative to ``before`` relative to ``after``."""
    return gl.where(before == after, 1.0, gl.exp2(before - after))


@gluon.jit
def scaled(block, factor):
    """Multiply the rows of a block by the factors of their heads."""
    of_threads = _of_threads(block)
    return _as_block(of_threads * _beside(factor, of_threads), block)


@gluon.jit
def moved_total(total, before, after):
    """Make a total of (64 heads, 256 columns) that is relative to ``before`` relative to ``after``."""
    of_threads = _of_threads(total)
    moved = gl.inline_asm_elementwise(
        MOVE,
        MOVE_OPERANDS,
        [of_threads, _beside(before, of_threads), _beside(after, of_threads)],
        dtype=gl.float32,
        is_pure=True,
        pack=128,
    )
    return _as_block(moved, total)


@gluon.jit
def rounded_like(exponentials, queries):
    """Return ``exponentials`` in the dtype of ``queries``, half precision.

    One instruction converts two numbers. Without assembly, ptxas converts them one by one at a quarter of the rate,
    because they are also added up.
    """
    name: gl.constexpr = "bf16x2" if queries.dtype == gl.bfloat16 else "f16x2"
    assembly: gl.constexpr = "cvt.rn." + name + ".f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(assembly, "=r,r,r", [exponentials], dtype=queries.dtype, is_pure=True, pack=2)


@gluon.jit
def _of_threads(block):
    """Return a block of an accumulator as (heads, eights of columns, 4 threads, 2 columns)."""
    return block.reshape([block.shape[0], block.shape[1] // 8, 4, 2])


@gluon.jit
def _as_block(of_threads, like):
    """Return a block of :func:`_of_threads` in the shape and layout of ``like``."""
    return gl.convert_layout(of_threads.reshape(like.shape), like.type.layout, assert_trivial=True)


@gluon.jit
def _beside(vector, of_threads):
    """Return a vector, (heads, 4 threads), so that it broadcasts to a block of :func:`_of_threads`."""
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, of_threads.type.layout))
    return gl.convert_layout(vector, layout, assert_trivial=True)[:, None, :, None]


@gluon.jit
def _first_of_threads(of_threads):
    """Return the first number that each thread has of each head, (heads, 4 threads)."""
    first, _ = gl.split(of_threads.reshape([BLOCK_HEADS, 2, 2, 2, 4, 2]))
    first, _ = gl.split(first.permute((0, 2, 3, 4, 1)))
    first, _ = gl.split(first.permute((0, 2, 3, 1)))
    first, _ = gl.split(first.permute((0, 2, 1)))
    return gl.convert_layout(first, PER_THREAD, assert_trivial=True)


# Numbers of a thread have the order of its registers: two columns of a head, two of the head eight rows below, then
# the next eight columns. So numbers 0 and 2 are of its two heads.

EXPONENTIALS = gl.constexpr(
    # $0 to $31: exponentials, first relative to the former origin. $32 and $34: the origins
    # $96 to $127: scores. $128: scale. $160, $162: former origins. $192, $194: the thread's highest scores
    "{ .reg .pred %moves; .reg .f32 %first, %second, %other;"
    " mov.f32 $32, $160; mov.f32 $34, $162;"
    " mul.f32 %first, $192, $128; mul.f32 %second, $194, $128;"
    f" add.f32 %other, $160, {MARGIN.value}; setp.gt.f32 %moves, %first, %other;"
    f" add.f32 %other, $162, {MARGIN.value}; setp.gt.or.f32 %moves, %second, %other, %moves;"
    " vote.sync.any.pred %moves, %moves, 0xffffffff; @!%moves bra.uni DONE; "
    + "".join(
        f" shfl.sync.bfly.b32 %other, {highest}, {distance}, 0x1f, 0xffffffff; max.f32 {highest}, {highest}, %other;"
        for distance in (1, 2)
        for highest in ("%first", "%second")
    )
    + "".join(
        f" add.f32 %other, ${former}, {MARGIN.value}; setp.gt.f32 %moves, {highest}, %other;"
        f" selp.f32 ${origin}, {highest}, ${former}, %moves;"
        f" setp.eq.f32 %moves, ${origin}, 0fFF800000; selp.f32 {highest}, 0f00000000, ${origin}, %moves;"
        for origin, former, highest in ((32, 160, "%first"), (34, 162, "%second"))
    )
    + "".join(
        f" mul.f32 %other, ${96 + i}, $128; sub.f32 %other, %other, {'%second' if i & 2 else '%first'};"
        f" ex2.approx.ftz.f32 ${i}, %other;"
        for i in range(32)
    )
    + " DONE: }"
)
EXPONENTIALS_OPERANDS = gl.constexpr(",".join(["=f"] * 64 + [str(i) for i in range(32)] + ["f"] * 128))

MOVE = gl.constexpr(
    # $0 to $127: the total. $256, $258: former origins. $384, $386: origins
    "{ .reg .pred %moves; .reg .f32 %first, %second;"
    " setp.neu.f32 %moves, $256, $384; setp.neu.or.f32 %moves, $258, $386, %moves;"
    " vote.sync.any.pred %moves, %moves, 0xffffffff; @!%moves bra.uni DONE; "
    + "".join(
        f" sub.f32 {factor}, ${former}, ${origin}; ex2.approx.ftz.f32 {factor}, {factor};"
        f" setp.eq.f32 %moves, ${former}, ${origin}; selp.f32 {factor}, 0f3F800000, {factor}, %moves;"
        for origin, former, factor in ((384, 256, "%first"), (386, 258, "%second"))
    )
    + "".join(f" mul.f32 ${i}, ${i}, {'%second' if i & 2 else '%first'};" for i in range(128))
    + " DONE: }"
)
MOVE_OPERANDS = gl.constexpr(",".join(["=f"] * 128 + [str(i) for i in range(128)] + ["f"] * 256))
