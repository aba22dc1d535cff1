# mypy: ignore-errors
"""One tile of heads on the GPU: load, norm, rotate, cast. All programs of preparation are made of these functions.

Beside each dimension of a head lies its partner, the one that rotation pairs it with, loaded a second time; dimensions
that do not rotate have partner 0, cosine 1 and sine -0, which leaves them as they are to the bit. So rotation is
elementwise.

Roundings are those of the torch backend: fp32 throughout, one cast to the model dtype after the mean of a block, one
after the norm, one at the end. Divisions are correctly rounded, and products are not fused with sums.
"""

import triton
import triton.language as tl


@triton.jit
def load_heads(ptr, at, live, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr):
    """Heads at offsets `at` [N] and the partners of their dimensions, [N, D] each, as stored; zeros where not live."""
    d = tl.arange(0, BLOCK_D)[None, :]
    ptr = ptr + at[:, None]
    x = tl.load(ptr + d, mask=live[:, None] & (d < DIM), other=0.0)
    partner = tl.load(ptr + tl.where(d < HALF, d + HALF, d - HALF), mask=live[:, None] & (d < 2 * HALF), other=0.0)
    return x, partner


@triton.jit
def divided(x, COUNT: tl.constexpr):
    """fp32 numbers by a whole one, correctly rounded; by a power of two a product is that too, and is shorter."""
    if COUNT & (COUNT - 1) == 0:
        return x * (1.0 / COUNT)
    else:
        return tl.math.div_rn(x, tl.full(x.shape, COUNT, tl.float32))


@triton.jit
def _sum_of_squares(x, DIM: tl.constexpr):
    """[N] sum of squares, fp32, the same bits in whatever order they are added.

    A block's key has to be the same however its tokens arrived, by one program among many blocks or by another alone,
    and the order of a floating-point sum follows how a tile lies in threads. So integers are added: each square in
    units of the largest number's power of two, in two limbs.
    """
    BITS: tl.constexpr = 22 if DIM <= 256 else 16  # DIM limbs add up to less than 2^31
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # of the largest magnitude; NaN is above all
    exponent = bits >> 23
    # below 2^-64 squares vanish, from 2^64 on they overflow
    kept = tl.minimum(tl.maximum(exponent, 127 - 64), 127 + 63)
    scaled = x * ((254 - kept) << 23).to(tl.float32, bitcast=True)[:, None]  # below 2
    square = scaled * scaled * (1 << (BITS - 2))
    whole = square.to(tl.int32)
    part = ((square - whole.to(tl.float32)) * (1 << BITS)).to(tl.int32)
    total = tl.sum(whole, 1).to(tl.float32) + tl.sum(part, 1).to(tl.float32) * (1.0 / (1 << BITS))
    back = (kept << 23).to(tl.float32, bitcast=True)
    largest = bits.to(tl.float32, bitcast=True)
    # infinity or NaN stay what they are
    return tl.where(exponent > 127 + 63, largest * largest, total * (1.0 / (1 << (BITS - 2))) * back * back)


@triton.jit
def norm_heads(
    x, partner, weight_ptr, eps,
    ANY_ORDER: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """RMS norm of heads in the model dtype: ``x / rms * (1 + weight)`` in fp32, rounded to that dtype; fp32 again.

    With ANY_ORDER the bits do not depend on how the tile lies in threads. Nor do they where some heads or rows of
    angles begin at no multiple of 16 bytes: there a tile lies as the strides of the step allow.
    """
    model_dtype: tl.constexpr = x.dtype
    d = tl.arange(0, BLOCK_D)
    weight = 1.0 + tl.load(weight_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)
    of_partner = tl.load(weight_ptr + tl.where(d < HALF, d + HALF, d - HALF), mask=d < 2 * HALF, other=0.0)
    of_partner = 1.0 + of_partner.to(tl.float32)
    x, partner = x.to(tl.float32), partner.to(tl.float32)
    LIES_ANYHOW: tl.constexpr = ANY_ORDER | (DIM % 16 != 0) | (HALF % 8 != 0)
    squares = _sum_of_squares(x, DIM) if LIES_ANYHOW else tl.sum(x * x, 1)
    scale = tl.math.rsqrt(divided(squares, DIM) + eps)[:, None]
    x = (x * scale * weight[None, :]).to(model_dtype).to(tl.float32)
    partner = (partner * scale * of_partner[None, :]).to(model_dtype).to(tl.float32)
    return x, partner


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
    HALF: tl.constexpr, BLOCK_D: tl.constexpr, HEIGHTS: tl.constexpr, WIDTHS: tl.constexpr,
):  # fmt: skip
    """Cosines and signed sines [N, D] in fp32. Frequency j takes axis j % 3 while the section of that axis lasts."""
    d = tl.arange(0, BLOCK_D)[None, :]
    j = tl.where(d < HALF, d, d - HALF)
    position = time[:, None]
    if HEIGHTS > 0:
        position = tl.where((j % 3 == 1) & (j < 3 * HEIGHTS), height[:, None], position)
    if WIDTHS > 0:
        position = tl.where((j % 3 == 2) & (j < 3 * WIDTHS), width[:, None], position)
    position = tl.minimum(tl.maximum(position, 0), last_position)  # whatever the positions are, nothing else is read
    at = table_ptr + position.to(tl.int64) * stride_table + j
    mask = live[:, None] & (d < 2 * HALF)
    cos = tl.load(at, mask=mask, other=1.0).to(tl.float32)
    sin = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    return cos, sin * tl.where((d >= HALF) & (d < 2 * HALF), 1.0, -1.0)


@triton.jit
def rotate(x, partner, cos, sin):
    """Rotated heads, fp32, not yet cast."""
    return x * cos + partner * sin


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
def store_heads(ptr, at, live, x, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Cast heads and store them at offsets `at` [N]."""
    d = tl.arange(0, BLOCK_D)[None, :]
    tl.store(ptr + at[:, None] + d, cast_to(x, ptr.dtype.element_ty), mask=live[:, None] & (d < DIM))
