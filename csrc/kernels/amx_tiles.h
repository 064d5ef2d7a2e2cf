// Tile instructions (AMX), behind the few functions that linear_tiles.h calls, and the same arithmetic in plain C++.
//
// A tile is up to 16 rows of up to 64 bytes. Tiles 0 to 3 hold sums, height x columns of fp32. Tiles 4 and 5 hold the left
// operand (weights or inputs of a linear layer), height x 32 of bf16. Tiles 6 and 7 hold the right one, 16 x columns of bf16
// pairs. The tests run both classes where a machine has AMX (in linear, an Intel Xeon of the Granite Rapids generation gave
// equal bits), and PortableTiles everywhere.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/dtype.h"
#include "kernels/multiversion.h"

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace specdec {

constexpr int kTileHeight = 16;      // rows of a tile
constexpr int kTilePairs = 16;       // pairs of bf16 in a row of weights
constexpr int kTileRowBytes = 64;

// TDPBF16PS as Intel's manual defines it (Instruction Set Reference, "Operation"). For every element of the sums, one chain
// of fp32 FMAs that begins at zero adds the products of the even inputs, and another chain those of the odd inputs. The sum
// of both chains is added to the element. Subnormal operands count as zero and subnormal results become zero (DAZ, FTZ).
// All operations round to nearest even.
class PortableTiles {
 public:
  void configure(std::int64_t columns, std::int64_t height = kTileHeight) { columns_ = columns, height_ = height; }
  void release() {}

  template <int kTile>
  void zero() {
    std::memset(tiles_[kTile], 0, sizeof(tiles_[kTile]));
  }

  template <int kTile>
  void load(const void* from, std::int64_t stride) {
    for (int row = 0; row < rows(kTile); ++row) {
      std::memcpy(tiles_[kTile][row], static_cast<const char*>(from) + row * stride, row_bytes(kTile));
    }
  }

  template <int kTile>
  void store(void* to, std::int64_t stride) const {
    for (int row = 0; row < rows(kTile); ++row) {
      std::memcpy(static_cast<char*>(to) + row * stride, tiles_[kTile][row], row_bytes(kTile));
    }
  }

  template <int kSums, int kWeights, int kInputs>
  void multiply_add() {
    for (std::int64_t m = 0; m < height_; ++m) {
      for (std::int64_t n = 0; n < columns_; ++n) {
        float even = 0.0f, odd = 0.0f;
        for (int k = 0; k < kTilePairs; ++k) {
          even = flushed(std::fma(half<0>(tiles_[kWeights][m][k]), half<0>(tiles_[kInputs][k][n]), even));
          odd = flushed(std::fma(half<1>(tiles_[kWeights][m][k]), half<1>(tiles_[kInputs][k][n]), odd));
        }
        std::uint32_t& sum = tiles_[kSums][m][n];
        sum = bit_cast<std::uint32_t>(flushed(flushed(bit_cast<float>(sum)) + flushed(even + odd)));
      }
    }
  }

 private:
  std::int64_t rows(int tile) const { return tile < 6 ? height_ : kTileHeight; }

  std::size_t row_bytes(int tile) const {
    return tile == 4 || tile == 5 ? kTileRowBytes : static_cast<std::size_t>(columns_) * sizeof(std::uint32_t);
  }

  static float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

  template <int kHalf>
  static float half(std::uint32_t pair) {
    return flushed(BFloat16::load(static_cast<std::uint16_t>(pair >> (16 * kHalf))));
  }

  std::int64_t columns_ = 0, height_ = kTileHeight;
  std::uint32_t tiles_[8][kTileHeight][kTileRowBytes / sizeof(std::uint32_t)];
};

#ifdef SPECDEC_X86_64_LEVELS
// The rows of each tile, and the bytes of a row, as ldtilecfg reads them; every thread has its own configuration.
struct TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  void load() const { asm volatile("ldtilecfg %0" ::"m"(*this)); }
  static void release() { asm volatile("tilerelease" ::: "memory"); }
};
static_assert(sizeof(TileConfig) == 64, "");

// The instructions themselves, as inline assembly: GCC's intrinsics for them accept no template parameter as the number of
// a tile, and do not declare that a load reads memory. All of them are volatile, so they stay in order.
class AmxTiles {
 public:
  void configure(std::int64_t columns, std::int64_t height = kTileHeight) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      config.rows[tile] = static_cast<std::uint8_t>(tile < 6 ? height : kTileHeight);
      config.row_bytes[tile] = static_cast<std::uint16_t>(tile == 4 || tile == 5 ? kTileRowBytes : 4 * columns);
    }
    config.load();
  }
  void release() { TileConfig::release(); }

  template <int kTile>
  void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }

  template <int kTile>
  void load(const void* from, std::int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
  }

  template <int kTile>
  void store(void* to, std::int64_t stride) const {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
  }

  template <int kSums, int kWeights, int kInputs>
  void multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kWeights), "i"(kInputs));
  }
};
#endif

// Returns whether this process may use AmxTiles. Asks the processor whether it has AMX, and Linux for the permission that
// tile registers need.
inline bool permitted_amx() {
#if defined(SPECDEC_X86_64_LEVELS) && defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace specdec
