// Copies runs of bytes (parts of KV blocks) out of or into a pool, and hashes the very bytes that were copied.
//
//   gather    run 0 ─┐                         scatter   ┌─► run 0
//             run 1 ─┼─► packed, hash            packed ─┼─► run 1, hash
//             run 2 ─┘                                   └─► run 2
//
// The hash is XXH3-64 (seed 0) of the packed bytes, as in the reference implementation's specification: a worker without
// this library uses the xxhash package and gets the same number. Each vector is loaded once, stored and hashed from the
// same register. So one pass over memory serves both, and the hash vouches for what was stored, whatever is written to
// the source meanwhile. Only for runs of whole stripes (64 bytes), and for enough bytes for XXH3's long form (241).
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace baton {

constexpr int64_t STRIPE = 64;

namespace xxh3 {

constexpr uint64_t P32_1 = 0x9E3779B1u, P32_2 = 0x85EBCA77u, P32_3 = 0xC2B2AE3Du;
constexpr uint64_t P64_1 = 0x9E3779B185EBCA87u, P64_2 = 0xC2B2AE3D27D4EB4Fu, P64_3 = 0x165667B19E3779F9u;
constexpr uint64_t P64_4 = 0x85EBCA77C2B2AE63u, P64_5 = 0x27D4EB2F165667C5u;
constexpr int STRIPES_PER_BLOCK = 16;

alignas(64) constexpr uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

inline uint64_t word(const uint8_t* p) {
  uint64_t w;
  memcpy(&w, p, 8);
  return w;
}

// One stripe, 512 bits, in one register or two.
#ifdef __AVX512F__
struct Vector {
  __m512i v;
  static Vector load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
  void store(uint8_t* p) const { _mm512_storeu_si512(p, v); }
  void stream(uint8_t* p) const { _mm512_stream_si512((__m512i*)p, v); }
  void accumulate(Vector data, const uint8_t* secret) {
    const __m512i key = _mm512_xor_si512(data.v, _mm512_loadu_si512(secret));
    const __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
    v = _mm512_add_epi64(v, _mm512_add_epi64(product, _mm512_shuffle_epi32(data.v, (_MM_PERM_ENUM)0x4E)));
  }
  void scramble() {
    const __m512i x = _mm512_xor_si512(_mm512_xor_si512(v, _mm512_srli_epi64(v, 47)),
                                       _mm512_loadu_si512(SECRET + sizeof SECRET - STRIPE));
    const __m512i prime = _mm512_set1_epi64((long long)P32_1);
    const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), prime);
    v = _mm512_add_epi64(_mm512_mul_epu32(x, prime), _mm512_slli_epi64(high, 32));
  }
};
#else
struct Vector {
  __m256i a, b;
  static Vector load(const uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
  }
  void store(uint8_t* p) const {
    _mm256_storeu_si256((__m256i*)p, a);
    _mm256_storeu_si256((__m256i*)(p + 32), b);
  }
  void stream(uint8_t* p) const {
    _mm256_stream_si256((__m256i*)p, a);
    _mm256_stream_si256((__m256i*)(p + 32), b);
  }
  void accumulate(Vector data, const uint8_t* secret) {
    a = half(a, data.a, secret);
    b = half(b, data.b, secret + 32);
  }
  void scramble() {
    a = scrambled(a, SECRET + sizeof SECRET - STRIPE);
    b = scrambled(b, SECRET + sizeof SECRET - STRIPE + 32);
  }

 private:
  static __m256i half(__m256i acc, __m256i data, const uint8_t* secret) {
    const __m256i key = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i*)secret));
    const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
    return _mm256_add_epi64(acc, _mm256_add_epi64(product, _mm256_shuffle_epi32(data, 0x4E)));
  }
  static __m256i scrambled(__m256i acc, const uint8_t* secret) {
    const __m256i x = _mm256_xor_si256(_mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47)),
                                       _mm256_loadu_si256((const __m256i*)secret));
    const __m256i prime = _mm256_set1_epi64x((long long)P32_1);
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(x, prime), _mm256_slli_epi64(high, 32));
  }
};
#endif

// XXH3's long form over whole stripes that come one after another; the number of bytes is known from the start.
class Stream {
 public:
  explicit Stream(int64_t num_bytes) : num_bytes_(num_bytes), left_(num_bytes / STRIPE) {
    alignas(64) static const uint64_t start[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    acc_ = Vector::load((const uint8_t*)start);
  }

  // The next num_bytes (whole stripes); each vector read is also handed to sink(offset, vector).
  template <class Sink>
  void run(const uint8_t* from, int64_t num_bytes, const Sink& sink) {
    Vector acc = acc_;
    int64_t at = 0;
    while (at < num_bytes) {
      if (in_block_ == 0 && num_bytes - at >= STRIPES_PER_BLOCK * STRIPE && left_ > STRIPES_PER_BLOCK) {
        for (int i = 0; i < STRIPES_PER_BLOCK; ++i, at += STRIPE) {
          const Vector data = Vector::load(from + at);
          sink(at, data);
          acc.accumulate(data, SECRET + 8 * i);
        }
        acc.scramble();
        left_ -= STRIPES_PER_BLOCK;
        continue;
      }
      const Vector data = Vector::load(from + at);
      sink(at, data);
      at += STRIPE;
      if (--left_ == 0) {
        acc.accumulate(data, SECRET + sizeof SECRET - STRIPE - 7);
        break;
      }
      acc.accumulate(data, SECRET + 8 * in_block_);
      if (++in_block_ == STRIPES_PER_BLOCK) {
        acc.scramble();
        in_block_ = 0;
      }
    }
    acc_ = acc;
  }

  uint64_t digest() const {
    alignas(64) uint8_t acc[STRIPE];
    acc_.store(acc);
    uint64_t h = (uint64_t)num_bytes_ * P64_1;
    for (int i = 0; i < 4; ++i) {
      const unsigned __int128 product = (unsigned __int128)(word(acc + 16 * i) ^ word(SECRET + 11 + 16 * i)) *
                                        (word(acc + 16 * i + 8) ^ word(SECRET + 19 + 16 * i));
      h += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    h ^= h >> 37;
    h *= 0x165667919E3779F9u;
    return h ^ h >> 32;
  }

 private:
  Vector acc_;
  const int64_t num_bytes_;
  int64_t left_;  // stripes to come
  int in_block_ = 0;
};

}  // namespace xxh3

// A run starts where no prefetcher expects it: its first lines are fetched while the run before is copied.
inline uint64_t gather_runs(const uint64_t* runs, int64_t num_runs, int64_t run_bytes, uint8_t* packed) {
  constexpr int64_t FETCHED_AHEAD = 4096;
  xxh3::Stream hash(num_runs * run_bytes);
  for (int64_t i = 0; i < num_runs; ++i, packed += run_bytes) {
    const char* next = (const char*)runs[i + 1 < num_runs ? i + 1 : i];
    hash.run((const uint8_t*)runs[i], run_bytes, [=](int64_t at, xxh3::Vector v) {
      const int64_t ahead = at - (run_bytes - FETCHED_AHEAD);
      if (ahead >= 0) _mm_prefetch(next + ahead, _MM_HINT_T0);
      v.store(packed + at);
    });
  }
  return hash.digest();
}

// Past the cache where a run allows it: the pool is far larger than any cache, and a store that misses would first read.
inline uint64_t scatter_runs(const uint8_t* packed, const uint64_t* runs, int64_t num_runs, int64_t run_bytes) {
  xxh3::Stream hash(num_runs * run_bytes);
  for (int64_t i = 0; i < num_runs; ++i, packed += run_bytes) {
    uint8_t* to = (uint8_t*)runs[i];
    if ((uintptr_t)to % STRIPE == 0)
      hash.run(packed, run_bytes, [=](int64_t at, xxh3::Vector v) { v.stream(to + at); });
    else
      hash.run(packed, run_bytes, [=](int64_t at, xxh3::Vector v) { v.store(to + at); });
  }
  _mm_sfence();
  return hash.digest();
}

}  // namespace baton
