"""Parts of the kernels of packed weights: codes become values, in the registers in which they are multiplied.

``quantized_linear`` and ``grouped_quantized_linear`` call them, so a row has the same bits in both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_fast.triton_kernels.byte_permutation import permute

# How a code becomes a value.
INT8 = tl.constexpr(0)
FLOAT8 = tl.constexpr(1)
TABLE = tl.constexpr(2)


@triton.jit
def _bytes_of_table(table, FIRST: tl.constexpr, SHIFT: tl.constexpr, DTYPE: tl.constexpr):
    """Return the bytes at ``SHIFT`` of four entries in ``DTYPE``, as an int32 ``[1, 1, 1]``.

    They are loaded as a tensor. The compiler gives values the layout of a product only if all that they are computed
    from are loads; scalars that are spread over a tensor are none.
    """
    packed = 0
    for i in tl.static_range(4):
        value = tl.load(table + tl.full([1, 1, 1], FIRST + i, tl.int32))
        bits = value.to(tl.int32) if DTYPE.is_int8() else value.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        packed |= ((bits >> SHIFT) & 255) << (8 * i)
    return packed


@triton.jit
def registers_of_table(table, DTYPE: tl.constexpr, PERMUTES: tl.constexpr):
    """Return the low bytes of the 16 entries in four int32, and the second bytes in four; 0 if they are not needed."""
    if PERMUTES:
        low_0 = _bytes_of_table(table, 0, 0, DTYPE)
        low_1 = _bytes_of_table(table, 4, 0, DTYPE)
        low_2 = _bytes_of_table(table, 8, 0, DTYPE)
        low_3 = _bytes_of_table(table, 12, 0, DTYPE)
        high_0 = _bytes_of_table(table, 0, 8, DTYPE)
        high_1 = _bytes_of_table(table, 4, 8, DTYPE)
        high_2 = _bytes_of_table(table, 8, 8, DTYPE)
        high_3 = _bytes_of_table(table, 12, 8, DTYPE)
        registers = (low_0, low_1, low_2, low_3, high_0, high_1, high_2, high_3)
    else:
        registers = (0, 0, 0, 0, 0, 0, 0, 0)
    return registers


@triton.jit
def _looked_up(words, registers, DTYPE: tl.constexpr):
    """Return the entries of 8 codes a word ``[LANES, WORDS, OUT, 8]``, in the order of the inputs, in ``DTYPE``.

    Three bits of a code choose one of 8 bytes, and its fourth bit chooses between entries 0 to 7 and 8 to 15.
    """
    codes = words & 0x77777777
    which = (words >> 1) & 0x44444444 | 0x32103210
    # The codes of a half word are those of inputs 0, 4, 1, 5, or 2, 6, 3, 7.
    low_0 = _bytes_of_codes(codes, which, registers[0], registers[1], registers[2], registers[3])
    low_1 = _bytes_of_codes(codes >> 16, which >> 16, registers[0], registers[1], registers[2], registers[3])
    if DTYPE.is_int8():
        values = tl.join(_four_bytes(permute(low_0, low_1, 0x6420)), _four_bytes(permute(low_0, low_1, 0x7531)))
        values = values.permute(0, 1, 2, 4, 3)
    else:
        high_0 = _bytes_of_codes(codes, which, registers[4], registers[5], registers[6], registers[7])
        high_1 = _bytes_of_codes(codes >> 16, which >> 16, registers[4], registers[5], registers[6], registers[7])
        first = tl.join(permute(low_0, high_0, 0x6240), permute(low_1, high_1, 0x6240))
        second = tl.join(permute(low_0, high_0, 0x7351), permute(low_1, high_1, 0x7351))
        pairs = tl.join(first, second).permute(0, 1, 2, 4, 3)
        values = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)).to(DTYPE, bitcast=True)
    return values.reshape(words.shape[0], words.shape[1], words.shape[2], 8)


@triton.jit
def _bytes_of_codes(codes, which, entries_0, entries_1, entries_2, entries_3):
    """Return four bytes: the entries of the codes in half a word, in the order of the codes."""
    return permute(permute(entries_0, entries_1, codes), permute(entries_2, entries_3, codes), which)


@triton.jit
def _four_bytes(words):
    """Return the bytes of words ``[LANES, WORDS, OUT]`` as int8, on a last axis.

    They are joined: the layout of a product could not be that of the words with shifts that vary along an axis.
    """
    even = tl.join(words.to(tl.int8), (words >> 16).to(tl.int8))
    odd = tl.join((words >> 8).to(tl.int8), (words >> 24).to(tl.int8))
    return tl.join(even, odd).reshape(words.shape[0], words.shape[1], words.shape[2], 4)


@triton.jit
def values_of(words, table, registers, DTYPE: tl.constexpr, KIND: tl.constexpr, PERMUTES: tl.constexpr):
    """Return the values of words ``[LANES, WORDS, OUT]`` of codes, in the order of the inputs, on a last axis."""
    if PERMUTES:
        values = _looked_up(words, registers, DTYPE)
    elif KIND == TABLE:
        place = tl.arange(0, 8)
        codes = (words[:, :, :, None] >> (place % 4 * 8 + place // 4 * 4)[None, None, None, :]) & 15
        values = tl.load(table + codes)
        if DTYPE.is_int8():
            values = values.to(tl.int32)
    else:
        values = _four_bytes(words)
        if KIND == FLOAT8:
            # As fp16, whose bias of the exponent is greater by 8. A magnitude of 127 is NaN.
            bits = values.to(tl.int16)
            magnitude = bits & 127
            half = ((bits & 128) << 8 | magnitude << 7).to(tl.float16, bitcast=True)
            values = tl.where(magnitude == 127, float("nan"), half.to(tl.float32) * 256.0)
    return values.to(DTYPE)


@triton.jit
def weights_of(values, LENGTH: tl.constexpr):
    """Return ``[LANES, OUT, inputs of a block]`` for ``[LANES, WORDS, OUT, codes of a word]``.

    Inputs and outputs are in an order in which a thread multiplies the codes of its own words: each of four threads
    multiplies ``LENGTH`` consecutive numbers at a time, of rows i and i + 8.
    """
    LANES: tl.constexpr = values.shape[0]
    WORDS: tl.constexpr = values.shape[1]
    OUT: tl.constexpr = values.shape[2]
    CODES: tl.constexpr = values.shape[3]
    THREADS: tl.constexpr = min(4, WORDS)
    parts = values.reshape(LANES, WORDS // THREADS, THREADS, OUT // 16, 8, 2, CODES // LENGTH, LENGTH)
    return parts.permute(0, 3, 5, 4, 1, 6, 2, 7).reshape(LANES, OUT, WORDS * CODES)


@triton.jit
def scales_of(
    scales, supers, tile, block, has_block, out_features, BLOCKS: tl.constexpr, GROUP: tl.constexpr,
    SIZE: tl.constexpr, OUT: tl.constexpr, PANEL: tl.constexpr,
):  # fmt: skip
    """Return scales of blocks ``[LANES, 1]`` as fp32 ``[LANES, OUT, 1]``, in the order of ``weights_of``.

    Integers are multiplied with what ``supers`` has for 256 inputs; these products are exact.
    """
    GROUPS: tl.constexpr = (BLOCKS + GROUP - 1) // GROUP
    numbers = _numbers_of(scales, tile, block // GROUP, has_block, out_features, GROUPS, OUT, PANEL)
    if scales.dtype.element_ty.is_int8():
        SUPER: tl.constexpr = 256 // SIZE  # blocks
        SUPERS: tl.constexpr = (BLOCKS + SUPER - 1) // SUPER
        numbers *= _numbers_of(supers, tile, block // SUPER, has_block, out_features, SUPERS, OUT, PANEL)
    return numbers


@triton.jit
def _numbers_of(
    scales, tile, group, has_block, out_features, GROUPS: tl.constexpr, OUT: tl.constexpr, PANEL: tl.constexpr
):
    """Return numbers of groups ``[LANES, 1]`` as fp32 ``[LANES, OUT, 1]``, in the order of ``weights_of``.

    Those of 16 and 8 bits are loaded in pairs and fours: nothing narrower than 32 bits is loaded ahead.
    """
    LANES: tl.constexpr = group.shape[0]
    PER_WORD: tl.constexpr = 32 // scales.dtype.element_ty.primitive_bitwidth
    WORDS: tl.constexpr = PANEL // PER_WORD  # of a panel
    place = tl.arange(0, OUT // PER_WORD)
    panel = tile * (OUT // PANEL) + place // WORDS
    at = (panel * (GROUPS * WORDS) + place % WORDS)[None, :] + group * WORDS
    mask = has_block & (panel * PANEL < out_features)[None, :]
    if PER_WORD == 2:
        pairs = tl.load(scales.to(tl.pointer_type(tl.int32), bitcast=True) + at, mask=mask, other=0)
        numbers = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)).to(scales.dtype.element_ty, bitcast=True)
    elif PER_WORD == 4:
        fours = tl.load(scales.to(tl.pointer_type(tl.int32), bitcast=True) + at, mask=mask, other=0)
        numbers = (fours[:, :, None] << (24 - 8 * tl.arange(0, 4))[None, None, :]) >> 24
    else:
        numbers = tl.load(scales + at, mask=mask, other=0.0)
    numbers = numbers.reshape(LANES, OUT // PANEL, PANEL // 2, 2).permute(0, 1, 3, 2)
    return numbers.reshape(LANES, OUT, 1).to(tl.float32)


@triton.jit
def inputs_of(numbers, WORDS: tl.constexpr, LENGTH: tl.constexpr):
    """Return ``[LANES, inputs, ROWS]`` in the order of ``weights_of`` for ``[LANES, ROWS, inputs of a block]``."""
    LANES: tl.constexpr = numbers.shape[0]
    ROWS: tl.constexpr = numbers.shape[1]
    SIZE: tl.constexpr = numbers.shape[2]
    THREADS: tl.constexpr = min(4, WORDS)
    parts = numbers.reshape(LANES, ROWS, WORDS // THREADS, THREADS, SIZE // WORDS // LENGTH, LENGTH)
    return parts.permute(0, 2, 4, 3, 5, 1).reshape(LANES, SIZE, ROWS)


@triton.jit
def products_of(weights, inputs):
    """Return ``[LANES, OUT, ROWS]`` in fp32: the products, added up for each block."""
    LANES: tl.constexpr = weights.shape[0]
    OUT: tl.constexpr = weights.shape[1]
    SIZE: tl.constexpr = weights.shape[2]
    ROWS: tl.constexpr = inputs.shape[2]
    if weights.dtype == tl.int8:
        if SIZE < 32:  # what the instruction multiplies; the other half is zeros
            weights = tl.join(weights, tl.zeros_like(weights)).reshape(LANES, OUT, 32)
            across = inputs.permute(0, 2, 1)
            inputs = tl.join(across, tl.zeros_like(across)).reshape(LANES, ROWS, 32).permute(0, 2, 1)
        products = tl.dot(weights, inputs, out_dtype=tl.int32).to(tl.float32)
    else:
        products = tl.dot(weights, inputs, input_precision="ieee")
    return products


@triton.jit
def added(sums):
    """Return ``[OUT, ROWS]``, outputs in their own order again: the sums of eight lanes, neighbours first."""
    OUT: tl.constexpr = sums.shape[1]
    ROWS: tl.constexpr = sums.shape[2]
    first, second = sums.permute(1, 2, 0).reshape(OUT, ROWS, 4, 2).split()
    first, second = (first + second).reshape(OUT, ROWS, 2, 2).split()
    first, second = (first + second).split()
    return (first + second).reshape(OUT // 16, 2, 8, ROWS).permute(0, 2, 1, 3).reshape(OUT, ROWS)


@triton.jit
def total_of_tile(
    rows, steps, codes, scales, mins, super_scales, super_mins, table, registers, row, is_row, stride_rows_row, tile,
    out_features, IN_FEATURES: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, ROUNDED: tl.constexpr,
    HAS_MINS: tl.constexpr, WORDS: tl.constexpr, SIZE: tl.constexpr, BLOCK_OUT: tl.constexpr,
    LANES: tl.constexpr, PANEL: tl.constexpr, STAGES: tl.constexpr, PERMUTES: tl.constexpr,
):  # fmt: skip
    """Return the products ``[BLOCK_OUT, BLOCK_ROWS]`` of a tile of outputs of one matrix with any rows, in fp32.

    Args:
        rows, steps, codes, scales, mins, super_scales, super_mins, table, stride_rows_row, out_features: as in the
            kernel of ``quantized_linear``, with the codes, scales and minima of the matrix.
        registers: see ``registers_of_table``.
        row, is_row: places of the rows, and which there are, ``[BLOCK_ROWS]``.
        tile: place of the tile, in int64.
        IN_FEATURES and others: as in the kernel of ``quantized_linear``.
        PERMUTES: whether codes are looked up in ``registers``.
    """
    BLOCKS: tl.constexpr = IN_FEATURES // SIZE
    LENGTH: tl.constexpr = 4 if ROUNDED or KIND == TABLE else 2  # consecutive numbers that a thread multiplies
    DTYPE: tl.constexpr = rows.dtype.element_ty
    output = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)  # [BLOCK_OUT]
    panel = output // PANEL
    in_panel = panel * PANEL < out_features
    word = tl.arange(0, WORDS)[None, :, None]
    codes_at = codes + (panel * (BLOCKS * WORDS * PANEL) + output % PANEL)[None, None, :] + word * PANEL
    row_offset = tl.multiple_of(row * stride_rows_row, 128 // DTYPE.primitive_bitwidth)  # of 16 bytes
    row_at = rows + row_offset[None, :, None] + tl.arange(0, SIZE)[None, None, :]
    sums = tl.zeros([LANES, BLOCK_OUT, row.shape[0]], tl.float32)
    for first in tl.range(0, BLOCKS, LANES, num_stages=STAGES):
        block = first + tl.arange(0, LANES)[:, None, None]
        inside = (block < BLOCKS) | (BLOCKS % LANES == 0)
        words = tl.load(codes_at + block * (WORDS * PANEL), mask=inside & in_panel[None, None, :], other=0)
        numbers = tl.load(row_at + block * SIZE, mask=inside & is_row[None, :, None], other=0)
        lane_block = first + tl.arange(0, LANES)[:, None]
        has_block = (lane_block < BLOCKS) | (BLOCKS % LANES == 0)
        scale = scales_of(
            scales, super_scales, tile, lane_block, has_block, out_features, BLOCKS, GROUP, SIZE, BLOCK_OUT, PANEL
        )
        weights = weights_of(values_of(words, table, registers, DTYPE, KIND, PERMUTES), LENGTH)
        inputs = inputs_of(numbers, WORDS, LENGTH)
        products = products_of(weights, inputs)
        if ROUNDED:
            step = tl.load(steps + (row * BLOCKS)[None, None, :] + block, mask=inside & is_row[None, None, :], other=0)
            products *= step
        sums = tl.fma(tl.broadcast_to(scale, products.shape), products, sums)
        if HAS_MINS:
            least = scales_of(
                mins, super_mins, tile, lane_block, has_block, out_features, BLOCKS, GROUP, SIZE, BLOCK_OUT, PANEL
            )
            totals = products_of(tl.full(weights.shape, 1, weights.dtype), inputs)
            if ROUNDED:
                totals *= step
            sums = tl.fma(tl.broadcast_to(least, totals.shape), totals, sums)
    return added(sums)
