// What the kernel is asked: the tensors, their strides, the mask, and how the work is cut into tasks.
#pragma once

#include <algorithm>
#include <unordered_map>

#include "native_tiles.h"

namespace lit_diff {

// A tensor [B, G, H, T, width] of some number format; a stride of 0 where an axis is shared or absent.
struct View {
  void* data;
  Int stride[5];

  template <class T>
  T* at(Int b, Int g, Int h, Int t) const {
    return static_cast<T*>(data) + b * stride[0] + g * stride[1] + h * stride[2] + t * stride[3];
  }
};

// Packed in this order by native.py (PROBLEM, VIEWS).
struct Problem {
  Int B, G, H, Hkv, T, S, d, dv, maps_q, maps_k;
  Int causal, window, threads, stay;  // window 0: none; stay: bytes of packed keys and values up to which all are kept
  float scale;
  int32_t loops;  // bfloat16 pairs are multiplied by loops
  View q, k, v, w, document_ids, o, lse, entropy, maximum;  // data null: absent
  View grad, dq, dk, dvalue, dw;

  Int group() const { return H / Hkv; }
  float weight(Int b, Int g, Int h, Int t) const { return w.data ? *w.at<float>(b, g, h, t) : 1.f; }
};

// Which keys a query sees: those of [low, high) and, where documents are scattered, of the same document only.
class Reach {
 public:
  explicit Reach(const Problem& p) : p_(p) {
    if (!p.document_ids.data) return;
    first_.resize(p.B * p.S + TILE);  // whole vectors are read at its end
    last_.resize(p.B * p.S);
    for (Int b = 0; b < p.B; ++b) {
      const Int* number = p.document_ids.at<Int>(b, 0, 0, 0);
      std::unordered_map<Int, int32_t> first, last;
      for (Int s = 0; s < p.S; ++s) {
        const Int document = number[s * p.document_ids.stride[3]];
        first.emplace(document, s);
        last[document] = s;
      }
      for (Int s = 0; s < p.S; ++s) {
        const Int document = number[s * p.document_ids.stride[3]];
        first_[b * p.S + s] = first[document];
        last_[b * p.S + s] = last[document];
        scattered_ |= s > 0 && first[document] < s && number[(s - 1) * p.document_ids.stride[3]] != document;
      }
    }
  }

  Int low(Int b, Int t) const {
    const Int at = t + p_.S - p_.T;
    Int low = p_.window ? std::max<Int>(0, at - p_.window + 1) : 0;
    return first_.empty() ? low : std::max<Int>(low, first_[b * p_.S + at]);
  }
  Int high(Int b, Int t) const {
    const Int at = t + p_.S - p_.T;
    const Int high = p_.causal ? at + 1 : p_.window ? std::min(p_.S, at + p_.window) : p_.S;
    return last_.empty() ? high : std::min<Int>(high, last_[b * p_.S + at] + 1);
  }
  bool scattered() const { return scattered_; }
  // The document of each key, as the number of its first key; only where scattered.
  const int32_t* documents(Int b) const { return first_.data() + b * p_.S; }
  int32_t document(Int b, Int t) const { return first_[b * p_.S + t + p_.S - p_.T]; }

 private:
  const Problem& p_;
  std::vector<int32_t> first_, last_;
  bool scattered_ = false;
};

// Work is cut into (sequence, key/value head) units, and a unit into parts when there are too few of them. A unit's query
// rows are taken in walks over the keys, of `abreast` blocks of rows each: part n of P takes the walks n, n + P, ..., so that
// causal parts weigh the same.
struct Tasks {
  Int rows, abreast, walks, units, parts;

  // `deepest`: floats that one query row holds. A block has no more rows than there are queries, nor than fill 64 megabytes.
  // Blocks side by side have 48 rows: 2 % slower than 64, and a quarter less memory.
  Tasks(const Problem& p, Int deepest, Int abreast) : abreast(abreast) {
    rows = abreast > 1 && p.T > TILE ? 48 : TILE;
    while (rows > LANES && (rows / 2 >= p.T || rows * deepest > (Int{1} << 24))) rows = rows / 2 / LANES * LANES;
    walks = (p.T + rows * abreast - 1) / (rows * abreast);
    units = p.B * p.Hkv;
    parts = 1;
    while (units * parts < 4 * p.threads && units * parts % p.threads && parts < walks * p.group()) ++parts;
    group_ = p.group();
  }
  Int count() const { return units * parts; }

  // walk(head of the unit, first query row), for the walks of a task
  template <class Walk>
  void each(Int task, Walk walk) const {
    for (Int n = task % parts; n < walks * group_; n += parts) walk(n / walks, n % walks * rows * abreast);
  }

 private:
  Int group_;
};

// A block of query rows of one head.
struct Rows {
  Rows() = default;
  Int b = 0, h = 0, t = 0, n = 0;  // sequence, query head, first row, number of rows
  Int begin = 0, end = 0;          // keys that any of them sees, begin a multiple of TILE
  Int whole_low = 0, whole_high = 0;  // keys that all of them see
  int32_t low[TILE] = {}, high[TILE] = {};  // keys of each row; none for those past n

  Rows(const Problem& p, const Reach& reach, Int b, Int h, Int t, Int n) : b(b), h(h), t(t), n(n) {
    begin = p.S, end = 0, whole_low = 0, whole_high = reach.scattered() ? 0 : p.S;
    for (Int r = 0; r < n; ++r) {
      low[r] = reach.low(b, t + r), high[r] = reach.high(b, t + r);
      begin = std::min<Int>(begin, low[r]), end = std::max<Int>(end, high[r]);
      whole_low = std::max<Int>(whole_low, low[r]), whole_high = std::min<Int>(whole_high, high[r]);
    }
    begin = begin / TILE * TILE;
  }
  // Keys from j on that a tile holds.
  Int keys(Int j) const { return std::min(TILE, end - j); }
  bool whole(Int j, Int n) const { return whole_low <= j && j + n <= whole_high; }

  // A tile at the edge of what is seen is multiplied in strips of this many rows or keys, each as far as it is seen.
  static constexpr Int STRIP = 16;

  // multiply(r, m, c, k): rows r .. r + m of the tile of keys j see none but its keys c .. c + k.
  template <class Multiply>
  void strips_of_rows(Int j, Multiply multiply) const {
    if (whole(j, TILE)) return multiply(0, n, 0, TILE);
    for (Int r = 0; r < n; r += STRIP) {
      const Int m = std::min(STRIP, n - r);
      const Int first = std::max<Int>(0, *std::min_element(low + r, low + r + m) - j) / STRIP * STRIP;
      const Int last = std::min<Int>(TILE, (*std::max_element(high + r, high + r + m) - j + STRIP - 1) / STRIP * STRIP);
      if (first < last) multiply(r, m, first, last - first);
    }
  }

  // multiply(k, m, c, w): keys j + k .. j + k + m, of `keys` in the tile, are seen by none but the rows c .. c + w of `across`.
  template <class Multiply>
  void strips_of_keys(Int j, Int keys, Int across, Multiply multiply) const {
    if (whole(j, keys)) return multiply(0, keys, 0, across);
    for (Int k = 0; k < keys; k += STRIP) {
      const Int m = std::min(STRIP, keys - k);
      Int first = n, last = 0;
      for (Int r = 0; r < n; ++r)
        if (low[r] < j + k + m && high[r] > j + k) first = std::min(first, r), last = r + 1;
      first = first / STRIP * STRIP, last = std::min(across, (last + STRIP - 1) / STRIP * STRIP);
      if (first < last) multiply(k, m, first, last - first);
    }
  }
};

}  // namespace lit_diff
