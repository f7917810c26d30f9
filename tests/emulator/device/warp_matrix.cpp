// Matrix instructions of one warp: ldmatrix, stmatrix, mma.sync.  Lanes are written l, with g = l / 4 and t = l % 4.
#include <cstring>
#include "numbers.h"
#include "ptx_sm80.h"
#include "shared_memory.h"

namespace emu {
// ---- ldmatrix, stmatrix (PTX ISA, "ldmatrix", "stmatrix") -----------------------------------------------------------
// Lanes 8i..8i+7 give the row addresses of matrix i.  Lane l holds the elements (g, 2t + {0,1}) of each matrix in one
// register, or with .trans the elements (2t + {0,1}, g).
namespace {
struct MatrixAccess {
  u32 address, count;
  bool transposed;
  u32* r;
};
}  // namespace

void load_matrix(u32 count, bool transposed, u32 address, u32* r) {
  MatrixAccess mine{address, count, transposed, r};
  rendezvous(transposed ? "ldmatrix.trans" : "ldmatrix", &mine, [](void** slots) {
    MatrixAccess** all = reinterpret_cast<MatrixAccess**>(slots);
    const bool transposed = all[0]->transposed;
    for (u32 i = 0; i < all[0]->count; ++i) {
      u16 m[8][8];
      for (u32 row = 0; row < 8; ++row) memcpy(m[row], shared_read(all[8 * i + row]->address, 16, "ldmatrix"), 16);
      for (u32 l = 0; l < kWarp; ++l) {
        const u32 g = l / 4, t = 2 * (l % 4);
        all[l]->r[i] = transposed ? m[t][g] | u32(m[t + 1][g]) << 16 : m[g][t] | u32(m[g][t + 1]) << 16;
      }
    }
  });
}
void store_matrix(u32 count, bool transposed, u32 address, const u32* r) {
  MatrixAccess mine{address, count, transposed, const_cast<u32*>(r)};
  if (lane() < 8 * count) shared_write(address, 16, "stmatrix");  // each lane answers for the row it addresses
  rendezvous(transposed ? "stmatrix.trans" : "stmatrix", &mine, [](void** slots) {
    MatrixAccess** all = reinterpret_cast<MatrixAccess**>(slots);
    for (u32 i = 0; i < all[0]->count; ++i)
      for (u32 row = 0; row < 8; ++row) {
        u16* p = reinterpret_cast<u16*>(shared_pointer(all[8 * i + row]->address, 16, 16, "stmatrix"));
        for (u32 column = 0; column < 8; ++column) {
          const u32 major = all[0]->transposed ? column : row, minor = all[0]->transposed ? row : column;
          p[column] = u16(all[major * 4 + minor / 2]->r[i] >> (16 * (minor & 1)));
        }
      }
  });
}

// ---- mma.sync, 16-bit operands (PTX ISA, "Matrix Fragments for mma.m16n8k8 / mma.m16n8k16") -------------------------
// A register r: row g + 8 (r & 1), k = 2t + {0,1} + 8 (r >> 1).  B register r: k = 2t + {0,1} + 8 r, column g.
// C register r: row g + 8 (r >> 1), column 2t + (r & 1).  Products are summed in float32, in the order of k.  Of 8-bit
// operands a register has four, k = 4t + {0,1,2,3} + 16 (...) ("Matrix Fragments for mma.m16n8k32").
namespace {
struct Operands {  // of one lane; reading them in place avoids copies of freshly written registers
  float* d;
  const u32 *a, *b;
  const float* c;
};
template <class Element, u32 kK>
void multiply_half(void** slots) {
  Operands** all = reinterpret_cast<Operands**>(slots);
  constexpr u32 kPacked = 4 / sizeof(typename Element::Bits), kWidth = 4 * kPacked;  // of a register, of four lanes'
  float a[16][kK], b[kK][8];
  const auto part = [](u32 word, u32 h) { return Element::value(typename Element::Bits(word >> (32 / kPacked * h))); };
  for (u32 l = 0; l < kWarp; ++l)
    for (u32 h = 0; h < kPacked; ++h) {
      const u32 g = l / 4, k = kPacked * (l % 4) + h;
      for (u32 r = 0; r < 2 * kK / kWidth; ++r) a[g + 8 * (r & 1)][k + kWidth * (r >> 1)] = part(all[l]->a[r], h);
      for (u32 r = 0; r < kK / kWidth; ++r) b[k + kWidth * r][g] = part(all[l]->b[r], h);
    }
  for (u32 row = 0; row < 16; ++row) {
    float sum[8] = {};
    for (u32 k = 0; k < kK; ++k)
      for (u32 column = 0; column < 8; ++column) sum[column] += a[row][k] * b[k][column];
    for (u32 column = 0; column < 8; ++column) {
      const Operands& lane = *all[row % 8 * 4 + column / 2];
      const u32 r = 2 * (row / 8) + column % 2;
      lane.d[r] = lane.c[r] + sum[column];
    }
  }
}
template <class Element, u32 kK>
void multiply_half(const char* operation, float* d, const u32* a, const u32* b, const float* c) {
  Operands mine{d, a, b, c};
  rendezvous(operation, &mine, multiply_half<Element, kK>);
}
}  // namespace

void mma_m16n8k8_f16(float* d, const u32* a, const u32* b, const float* c) {
  multiply_half<F16, 8>("mma.m16n8k8.f16", d, a, b, c);
}
void mma_m16n8k8_bf16(float* d, const u32* a, const u32* b, const float* c) {
  multiply_half<Bf16, 8>("mma.m16n8k8.bf16", d, a, b, c);
}
void mma_m16n8k16_f16(float* d, const u32* a, const u32* b, const float* c) {
  multiply_half<F16, 16>("mma.m16n8k16.f16", d, a, b, c);
}
void mma_m16n8k16_bf16(float* d, const u32* a, const u32* b, const float* c) {
  multiply_half<Bf16, 16>("mma.m16n8k16.bf16", d, a, b, c);
}

void mma_m16n8k32_e4m3(float* d, const u32* a, const u32* b, const float* c) {
  multiply_half<E4m3, 32>("mma.m16n8k32.e4m3", d, a, b, c);
}

// ---- mma.sync, double precision (PTX ISA, "Matrix Fragments for mma.m8n8k4 with .f64" and m16n8k4 to k16) -----------
// A register r: row g + 8 (r % (rows / 8)), k = t + 4 (r / (rows / 8)).  B register r: k = t + 4 r, column g.
// C register r: row g + 8 (r >> 1), column 2t + (r & 1).
namespace {
struct DoubleOperands {
  double* d;
  const double *a, *b, *c;
};
template <u32 kRows, u32 kK>
void multiply_double(void** slots) {
  constexpr u32 kBands = kRows / 8;
  DoubleOperands** all = reinterpret_cast<DoubleOperands**>(slots);
  double a[kRows][kK], b[kK][8];
  for (u32 l = 0; l < kWarp; ++l) {
    const u32 g = l / 4, t = l % 4;
    for (u32 r = 0; r < kBands * kK / 4; ++r) a[g + 8 * (r % kBands)][t + 4 * (r / kBands)] = all[l]->a[r];
    for (u32 r = 0; r < kK / 4; ++r) b[t + 4 * r][g] = all[l]->b[r];
  }
  for (u32 row = 0; row < kRows; ++row) {
    double sum[8] = {};
    for (u32 k = 0; k < kK; ++k)
      for (u32 column = 0; column < 8; ++column) sum[column] += a[row][k] * b[k][column];
    for (u32 column = 0; column < 8; ++column) {
      const DoubleOperands& lane = *all[row % 8 * 4 + column / 2];
      const u32 r = 2 * (row / 8) + column % 2;
      lane.d[r] = lane.c[r] + sum[column];
    }
  }
}
template <u32 kRows, u32 kK>
void multiply_double(const char* operation, double* d, const double* a, const double* b, const double* c) {
  DoubleOperands mine{d, a, b, c};
  rendezvous(operation, &mine, multiply_double<kRows, kK>);
}
}  // namespace

void mma_m8n8k4_f64(double* d, const double* a, const double* b, const double* c) {
  multiply_double<8, 4>("mma.m8n8k4.f64", d, a, b, c);
}
void mma_m16n8k4_f64(double* d, const double* a, const double* b, const double* c) {
  multiply_double<16, 4>("mma.m16n8k4.f64", d, a, b, c);
}
void mma_m16n8k8_f64(double* d, const double* a, const double* b, const double* c) {
  multiply_double<16, 8>("mma.m16n8k8.f64", d, a, b, c);
}
void mma_m16n8k16_f64(double* d, const double* a, const double* b, const double* c) {
  multiply_double<16, 16>("mma.m16n8k16.f64", d, a, b, c);
}
}  // namespace emu
