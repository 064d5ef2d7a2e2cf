// Rows of whole numbers: quantized_kernel.h includes this file, once per instruction set.
//
// The sums over a block are integers, which are exact in any order. Where an instruction multiplies bytes without a sign
// (weights) with bytes with one (rows), weights are raised by an offset, and the sums begin with what that adds.

constexpr bool kHasVnni =
#ifdef SPECDEC_VNNI
    true;
#else
    false;
#endif

// Inputs of the first row of a tile, at its first block; rows are `stride`, their blocks' numbers row_blocks apart.
struct WholeInputs {
  const std::int8_t* whole;
  std::int64_t stride;
  const float* steps;
  const std::int32_t* offsets;
  const float* sums;
};

int offset_of(const PackedWeight& weight) {
  if (!kHasVnni) return 0;
  return weight.kind == CodeKind::kInt8 ? 128 : -static_cast<int>(*std::min_element(weight.table, weight.table + 16));
}

// sum += the products of four bytes in every lane.
SPECDEC_INLINE Integers add_products(Integers sum, Words weights, std::uint32_t inputs) {
#if defined(SPECDEC_VNNI)
  return reinterpret_cast<Integers>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(weights),
                                                        _mm512_set1_epi32(static_cast<int>(inputs))));
#elif SPECDEC_LANES == 8
  // Magnitudes of weights times inputs with the weights' signs: at most 2 * 128 * 127, which no 16-bit sum exceeds.
  const __m256i own = reinterpret_cast<__m256i>(weights);
  const __m256i signs = _mm256_sign_epi8(_mm256_set1_epi32(static_cast<int>(inputs)), own);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(own), signs);
  return sum + reinterpret_cast<Integers>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#else
  for (int byte = 0; byte < 4; ++byte) {
    const int shift = 24 - 8 * byte;
    sum += (reinterpret_cast<Integers>(weights << shift) >> 24) * (static_cast<std::int32_t>(inputs << shift) >> 24);
  }
  return sum;
#endif
}

struct WholeInt8 {
  static constexpr int kPerWord = 1;  // vectors of four bytes for each output that a word holds
  explicit WholeInt8(const PackedWeight&) {}
  template <int kPart>
  SPECDEC_INLINE Words bytes(Words words) const {
    return kHasVnni ? words ^ 0x80808080u : words;
  }
};

struct WholeTable {
  static constexpr int kPerWord = 2;
  explicit WholeTable(const PackedWeight& weight) {
    const int offset = offset_of(weight);
    for (int i = 0; i < 64; ++i) table[i] = static_cast<std::int8_t>(static_cast<int>(weight.table[i % 16]) + offset);
  }
  template <int kPart>
  SPECDEC_INLINE Words bytes(Words words) const {
    const Words index = (kPart == 0 ? words : words >> 4) & 0x0f0f0f0fu;
#if SPECDEC_LANES == 16
    return reinterpret_cast<Words>(_mm512_shuffle_epi8(_mm512_loadu_si512(table), reinterpret_cast<__m512i>(index)));
#elif SPECDEC_LANES == 8
    const __m256i own = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(table));
    return reinterpret_cast<Words>(_mm256_shuffle_epi8(own, reinterpret_cast<__m256i>(index)));
#else
    Words bytes = {};
    for (int byte = 0; byte < 4; ++byte) {
      for (int i = 0; i < kLanes; ++i) {
        const auto value = static_cast<std::uint8_t>(table[(index[i] >> (8 * byte)) & 15u]);
        bytes[i] |= static_cast<std::uint32_t>(value) << (8 * byte);
      }
    }
    return bytes;
#endif
  }
  std::int8_t table[64];
};

template <typename Codes, int kR, int kP>
void multiply_whole_tile(const Codes& codes, const Tile& tile, const WholeInputs& inputs) {
  const std::uint32_t* from = tile.codes;
  const std::int8_t* whole = inputs.whole;
  for (std::int64_t block = 0; block < tile.num_blocks; ++block) {
    Integers sums[kR][kP * kPanelVectors];
    for (int r = 0; r < kR; ++r) {
      for (int p = 0; p < kP * kPanelVectors; ++p) sums[r][p] = Integers{} + inputs.offsets[r * tile.row_blocks + block];
    }
    const auto add = [&](auto part, const Words (&words)[kP * kPanelVectors]) {
      Words bytes[kP * kPanelVectors];
      for (int p = 0; p < kP * kPanelVectors; ++p) bytes[p] = codes.template bytes<decltype(part)::value>(words[p]);
      for (int r = 0; r < kR; ++r) {
        const auto input = load_as<std::uint32_t>(whole + r * inputs.stride);
        for (int p = 0; p < kP * kPanelVectors; ++p) sums[r][p] = add_products(sums[r][p], bytes[p], input);
      }
      whole += 4;
    };
    for (std::int64_t w = 0; w < tile.words; ++w, from += kPanelOutputs) {
      Words words[kP * kPanelVectors];
      for (int p = 0; p < kP; ++p) {
        for (int v = 0; v < kPanelVectors; ++v) {
          words[p * kPanelVectors + v] = load_as<Words>(from + p * tile.panel_words + v * kLanes);
          if (v == 0) __builtin_prefetch(from + p * tile.panel_words + tile.words_ahead, 0, 2);
        }
      }
      add(std::integral_constant<int, 0>(), words);
      if constexpr (Codes::kPerWord == 2) add(std::integral_constant<int, 1>(), words);
    }
    Vector scaled[kR][kP * kPanelVectors];
    for (int r = 0; r < kR; ++r) {
      const float step = inputs.steps[r * tile.row_blocks + block];
      for (int p = 0; p < kP * kPanelVectors; ++p) scaled[r][p] = __builtin_convertvector(sums[r][p], Vector) * step;
    }
    add_block<kR, kP>(tile, block, scaled, inputs.sums + block);
  }
}
