// A group of tokens of one head of a cache, in float32 and padded to whole registers, as decoding computes with them.
// bfloat16, odd numbers of channels and keys that are derived from values are converted into a buffer.
#pragma once
#include "head.h"

namespace gka {

constexpr int64_t KEYS = Vector::LANES;  // tokens of a group
constexpr int64_t MAX_CHANNELS = 128;

GKA_INLINE Vector channels_from(const float* row, int64_t d, int64_t count) { return load_channels(row, d, count); }
GKA_INLINE Vector channels_from(const uint16_t* row, int64_t d, int64_t count) {
  if (d + KEYS <= count) return Vector::widen(row + d);
  uint16_t some[KEYS] = {};
  std::memcpy(some, row + d, std::max<int64_t>(count - d, 0) * sizeof(uint16_t));
  return Vector::widen(some);
}

GKA_INLINE void write(float* to, float a) { *to = a; }
GKA_INLINE void write(uint16_t* to, float a) {  // to the nearest bfloat16, ties to even
  uint32_t bits;
  std::memcpy(&bits, &a, sizeof a);
  *to = a == a ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

// The tokens of a head in one of the tensors, some of them delayed.
template <typename T>
struct Rows {
  T* data;
  int64_t apart, delay;
  Rows(const GkaTensor& t, int64_t batch, int64_t head, const int64_t* delays)
      : data(static_cast<T*>(t.data) + batch * t.batch + head * t.head), apart(t.token),
        delay(delays ? delays[head] : 0) {}
  GKA_INLINE int64_t place(int64_t j) const { return std::max<int64_t>(j - delay, 0); }
  GKA_INLINE T* row(int64_t j) const { return data + place(j) * apart; }
};

// The rows that are read next. They are prefetched evenly while the group before them is computed, so that memory is
// never idle: the bytes of a row up to `derived` while keys are derived, up to `compared` while they are compared with
// queries, and up to `bytes` while values are mixed.
struct Next {
  const char* rows;
  int64_t apart, derived, compared, bytes;
  GKA_INLINE void prefetch(int64_t n, int64_t from, int64_t to) const {
    for (int64_t d = from; d < to; d += 64) __builtin_prefetch(rows + n * apart + d);
  }
};

// Up to KEYS tokens of a head in float32.
struct Group {
  int64_t count, channels, apart;
  Next next;
  const float* rows;
  alignas(64) float scale[KEYS];  // factors of the rows if they are keys
  alignas(64) float buffer[KEYS * MAX_CHANNELS] = {};  // the channels behind the last stay 0

  explicit Group(int64_t head_dim) : channels(round_up(head_dim, 16)) {}
  GKA_INLINE const float* row(int64_t n) const { return rows + n * apart; }

  template <typename T>
  GKA_INLINE void read(const Rows<T>& tokens, int64_t j, int64_t how_many, int64_t head_dim) {
    count = how_many;
    Vector::all(1.0f).store(scale);
    if constexpr (std::is_same_v<T, float>) {
      if (head_dim == channels && j >= tokens.delay) {
        rows = tokens.row(j), apart = tokens.apart;
        return;
      }
    }
    rows = buffer, apart = channels;
    for (int64_t n = 0; n < count; n++) {
      const T* token = tokens.row(j + n);
      for (int64_t d = 0; d < channels; d += KEYS) channels_from(token, d, head_dim).store(buffer + n * apart + d);
    }
  }

  // Keys: the two halves of each value, rotated by the table's row of its token; `scale` normalises them. HALF: the
  // channels of a half, or 0 if that is not known at compile time. SCALED: multiply by channel_scales first.
  template <int64_t HALF, bool SCALED, typename Table, typename T>
  GKA_INLINE void derive(const Rows<T>& values, const GkaRequest& q, int64_t h, int64_t j, int64_t how_many) {
    const int64_t half = HALF ? HALF : q.head_dim / 2;
    const float* factors = SCALED ? q.channel_scales + h * q.head_dim : nullptr;
    const Table *cos = static_cast<const Table*>(q.cos), *sin = static_cast<const Table*>(q.sin);
    count = how_many, rows = buffer, apart = channels;
    Vector squares[KEYS];
    for (int64_t n = count; n < KEYS; n++) squares[n] = Vector::all(0.0f);
    for (int64_t n = 0; n < count; n++) {
      const T *first = values.row(j + n), *second = first + half;
      const Table *c = cos + values.place(j + n) * half, *s = sin + values.place(j + n) * half;
      float* key = buffer + n * apart;
      next.prefetch(n, 0, next.derived);
      Vector even = Vector::all(0.0f), odd = even;
      GKA_UNROLL for (int64_t d = 0; d < half; d += KEYS) {
        Vector a = channels_from(first, d, half), b = channels_from(second, d, half);
        if constexpr (SCALED) {
          a = a * channels_from(factors, d, half);
          b = b * channels_from(factors + half, d, half);
        }
        const Vector cosine = channels_from(c, d, half), sine = channels_from(s, d, half);
        const Vector left = fma(a, cosine, b * sine), right = negated_fma(a, sine, b * cosine);
        store_channels(left, key, d, half);
        store_channels(right, key + half, d, half);
        even = fma(left, left, even), odd = fma(right, right, odd);
      }
      squares[n] = even + odd;
    }
    const Vector mean = sums(squares) * Vector::all(1.0f / float(2 * half));
    (Vector::all(1.0f) / (mean + Vector::all(q.eps)).sqrt()).store(scale);
  }
};

}  // namespace gka
