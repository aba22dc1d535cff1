# mypy: ignore-errors
"""One tile of heads on the GPU: load, norm, rotate, cast. All programs of preparation are made of these functions.

A head is held in three parts: the first and second half of its rotary dimensions, whose entries pair up, and the rest.
So rotation is elementwise. Roundings are those of the torch backend: fp32 throughout, one cast to the model dtype after
the mean of a block, one after the norm, one at the end. Divisions are correctly rounded, and products are not fused
with sums.
"""

import triton
import triton.language as tl


@triton.jit
def load_parts(
    ptr, at, live, HALF: tl.constexpr, REST: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr
):
    """Parts [N, half], [N, half], [N, rest] of heads at offsets `at` [N], as stored; zeros where not live."""
    j = tl.arange(0, BLOCK_HALF)[None, :]
    i = tl.arange(0, BLOCK_REST)[None, :]
    ptr = ptr + at[:, None]
    in_half = live[:, None] & (j < HALF)
    first = tl.load(ptr + j, mask=in_half, other=0.0)
    second = tl.load(ptr + HALF + j, mask=in_half, other=0.0)
    rest = tl.load(ptr + 2 * HALF + i, mask=live[:, None] & (i < REST), other=0.0)
    return first, second, rest


@triton.jit
def _limbs(x, unit, BITS: tl.constexpr):
    """[N] two integers that the squares of [N, W] numbers, in units below 2, add up to: wholes and 2^-BITS parts."""
    scaled = x * unit[:, None]
    square = scaled * scaled * (1 << (BITS - 2))  # below 2^BITS
    whole = square.to(tl.int32)
    part = ((square - whole.to(tl.float32)) * (1 << BITS)).to(tl.int32)
    return tl.sum(whole, 1), tl.sum(part, 1)


@triton.jit
def _largest_bits(x):
    """[N] bits of the largest magnitude of [N, W] fp32 numbers; NaN is above all."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def _sum_of_squares(first, second, rest, DIM: tl.constexpr):
    """[N] sum of the squares of all three parts, fp32, the same bits in whatever order they are added.

    A block's key has to be the same however its tokens arrived, by one program among many blocks or by another alone,
    and the order of a floating-point sum follows how a tile lies in threads. So integers are added: each square in
    units of the largest number's power of two, in two limbs.
    """
    BITS: tl.constexpr = 22 if DIM <= 256 else 16  # DIM limbs add up to less than 2^31
    bits = tl.maximum(tl.maximum(_largest_bits(first), _largest_bits(second)), _largest_bits(rest))
    exponent = bits >> 23
    # below 2^-64 squares vanish, from 2^64 on they overflow
    kept = tl.minimum(tl.maximum(exponent, 127 - 64), 127 + 63)
    unit = ((254 - kept) << 23).to(tl.float32, bitcast=True)
    whole, part = _limbs(first, unit, BITS)
    second_whole, second_part = _limbs(second, unit, BITS)
    rest_whole, rest_part = _limbs(rest, unit, BITS)
    whole = (whole + second_whole + rest_whole).to(tl.float32)
    part = (part + second_part + rest_part).to(tl.float32)
    back = (kept << 23).to(tl.float32, bitcast=True)
    total = (whole + part * (1.0 / (1 << BITS))) * (1.0 / (1 << (BITS - 2))) * back * back
    largest = bits.to(tl.float32, bitcast=True)
    return tl.where(exponent > 127 + 63, largest * largest, total)  # infinity or NaN


@triton.jit
def norm_parts(
    first, second, rest, weight_ptr, eps,
    HALF: tl.constexpr, REST: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """RMS norm of heads in the model dtype: ``x / rms * (1 + weight)`` in fp32, rounded to that dtype; fp32 again."""
    model_dtype: tl.constexpr = first.dtype
    DIM: tl.constexpr = 2 * HALF + REST
    j = tl.arange(0, BLOCK_HALF)
    i = tl.arange(0, BLOCK_REST)
    first_weight = 1.0 + tl.load(weight_ptr + j, mask=j < HALF, other=0.0).to(tl.float32)
    second_weight = 1.0 + tl.load(weight_ptr + HALF + j, mask=j < HALF, other=0.0).to(tl.float32)
    rest_weight = 1.0 + tl.load(weight_ptr + 2 * HALF + i, mask=i < REST, other=0.0).to(tl.float32)
    first, second, rest = first.to(tl.float32), second.to(tl.float32), rest.to(tl.float32)
    squares = _sum_of_squares(first, second, rest, DIM)
    scale = tl.math.rsqrt(tl.math.div_rn(squares, tl.full(squares.shape, DIM, tl.float32)) + eps)[:, None]
    first = (first * scale * first_weight[None, :]).to(model_dtype).to(tl.float32)
    second = (second * scale * second_weight[None, :]).to(model_dtype).to(tl.float32)
    rest = (rest * scale * rest_weight[None, :]).to(model_dtype).to(tl.float32)
    return first, second, rest


@triton.jit
def load_positions(positions_ptr, at, stride_axis, live, AXES: tl.constexpr):
    """Rotary positions [N] on each of three axes, the first one everywhere where only one is used."""
    time = tl.load(positions_ptr + at, mask=live, other=0)
    height = time
    width = time
    if AXES == 3:
        height = tl.load(positions_ptr + at + stride_axis, mask=live, other=0)
        width = tl.load(positions_ptr + at + 2 * stride_axis, mask=live, other=0)
    return time, height, width


@triton.jit
def load_angles(
    table_ptr, stride_table, last_position, time, height, width, live,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, HEIGHTS: tl.constexpr, WIDTHS: tl.constexpr,
):  # fmt: skip
    """Cosines and sines [N, half] in fp32. Frequency j takes axis j % 3 while the section of that axis lasts."""
    j = tl.arange(0, BLOCK_HALF)[None, :]
    position = time[:, None]
    if HEIGHTS > 0:
        position = tl.where((j % 3 == 1) & (j < 3 * HEIGHTS), height[:, None], position)
    if WIDTHS > 0:
        position = tl.where((j % 3 == 2) & (j < 3 * WIDTHS), width[:, None], position)
    position = tl.minimum(tl.maximum(position, 0), last_position)  # whatever the positions are, nothing else is read
    at = table_ptr + position.to(tl.int64) * stride_table + j
    mask = live[:, None] & (j < HALF)
    cos = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit
def rotate_parts(first, second, cos, sin):
    """Rotated halves, fp32, not yet cast."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def encode_e4m3(x):
    """Bits of float8 e4m3 of fp32 numbers, uint8: nearest, ties to even, saturated at 448, NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    saturated = tl.minimum(magnitude, 0x43E00000)  # 448
    normal = (saturated + 0x7FFFF + ((saturated >> 20) & 1) - (120 << 23)) >> 20
    # below 2^-6 the last place is 2^-9 throughout: adding 2^14, whose last place that is, rounds to it
    small = (saturated.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(saturated < 0x3C800000, small, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def cast_to(x, dtype: tl.constexpr):
    """The one cast at the end. Float8 saturates; it comes as uint8 where the architecture cannot convert."""
    if dtype == tl.uint8:
        return encode_e4m3(x)
    elif dtype == tl.float8e4nv:
        return tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def store_parts(
    ptr, at, live, first, second, rest,
    HALF: tl.constexpr, REST: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Cast fp32 parts of heads and store them at offsets `at` [N]."""
    dtype: tl.constexpr = ptr.dtype.element_ty
    j = tl.arange(0, BLOCK_HALF)[None, :]
    i = tl.arange(0, BLOCK_REST)[None, :]
    ptr = ptr + at[:, None]
    in_half = live[:, None] & (j < HALF)
    tl.store(ptr + j, cast_to(first, dtype), mask=in_half)
    tl.store(ptr + HALF + j, cast_to(second, dtype), mask=in_half)
    tl.store(ptr + 2 * HALF + i, cast_to(rest, dtype), mask=live[:, None] & (i < REST))
