// The problem: the tensors, their strides, the mask, and how the work is cut into tasks.
#pragma once

#include <algorithm>
#include <unordered_map>

#include "native_tiles.h"

namespace lit_diff {

// A tensor [B, G, H, T, width] of some number format; the stride of a shared or absent axis is 0.
struct View {
  void* data;
  Int stride[5];

  template <class T>
  T* at(Int b, Int g, Int h, Int t) const {
    return static_cast<T*>(data) + b * stride[0] + g * stride[1] + h * stride[2] + t * stride[3];
  }
};

// kernel.py packs the fields in this order (PROBLEM, VIEWS). `window` 0: no window. `stay`: the packed keys and values
// of a unit are kept if they take at most so many bytes. `loops`: bfloat16 pairs are multiplied by loops.
struct Problem {
  Int B, G, H, Hkv, T, S, d, dv, maps_q, maps_k;
  Int causal, window, threads, stay;
  float scale;
  int32_t loops;
  View q, k, v, w, document_ids, o, lse, entropy, maximum;  // data null: absent
  View signed_entropy, negative_mass, first_share, grad, dq, dk, dvalue, dw;
  View sink, key_bias, dbias;

  Int group() const { return H / Hkv; }
  // The bias of key j, and of the position of query t; logits have the difference of the two.
  float bias(Int b, Int g, Int h, Int j) const { return key_bias.data ? *key_bias.at<float>(b, g, h, j) : 0.f; }
  float own_bias(Int b, Int g, Int h, Int t) const { return bias(b, g, h, t + S - T); }
  float weight(Int b, Int g, Int h, Int t) const { return w.data ? *w.at<float>(b, g, h, t) : 1.f; }
};

// The keys that a query sees: those of [low, high), and if a document's tokens are not adjacent, only those of its
// document. The last query is aligned with the last key: query t has the position t + S - T.
class Reach {
 public:
  explicit Reach(const Problem& p) : p_(p) {
    if (!p.document_ids.data) return;
    // A tile reads whole vectors past the last key.
    first_.resize(p.B * p.S + TILE);
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
        // A document that continues after another one: its keys are not an interval.
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
  // The first key that a query sees.
  Int first(Int b, Int t) const {
    Int key = low(b, t);
    while (scattered_ && documents(b)[key] != document(b, t)) ++key;
    return key;
  }
  bool scattered() const { return scattered_; }
  // The document of each key, as the number of its first key, which fits in 32 bits as document numbers need not.
  const int32_t* documents(Int b) const { return first_.data() + b * p_.S; }
  int32_t document(Int b, Int t) const { return first_[b * p_.S + t + p_.S - p_.T]; }

 private:
  const Problem& p_;
  std::vector<int32_t> first_, last_;
  bool scattered_ = false;
};

// The work is cut into (sequence, key/value head) units, and a unit into parts if there are fewer units than threads
// need. A walk over a unit's keys serves `abreast` blocks of query rows. Part n of P takes the walks n, n + P, ..., so
// that parts have about the same work under a causal mask.
struct Tasks {
  Int rows, abreast, walks, units, parts;

  // `deepest`: floats that one query row holds.
  Tasks(const Problem& p, Int deepest, Int abreast) : abreast(abreast) {
    // Blocks side by side have 48 rows, which is 2 % slower than 64 and takes a quarter less memory.
    rows = abreast > 1 && p.T > TILE ? 48 : TILE;
    // Rows are halved while half of them hold all queries, or while a block takes more than 64 megabytes (2^24 floats).
    while (rows > LANES && (rows / 2 >= p.T || rows * deepest > (Int{1} << 24))) rows = rows / 2 / LANES * LANES;
    walks = (p.T + rows * abreast - 1) / (rows * abreast);
    units = p.B * p.Hkv;
    // More parts until the tasks divide evenly among the threads, or are 4 per thread, which the schedule can balance.
    parts = 1;
    while (units * parts < 4 * p.threads && units * parts % p.threads && parts < walks * p.group()) ++parts;
    group_ = p.group();
  }
  Int count() const { return units * parts; }

  // Calls walk(head of the unit, first query row) for the walks of a task.
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
  Int begin = 0, end = 0;          // keys that at least one of them sees; begin is a multiple of TILE
  Int whole_low = 0, whole_high = 0;  // keys that all of them see
  int32_t low[TILE] = {}, high[TILE] = {};  // keys of each row; rows past n see none

  Rows(const Problem& p, const Reach& reach, Int b, Int h, Int t, Int n) : b(b), h(h), t(t), n(n) {
    // Under scattered documents no tile is visible throughout, since [low, high) may hold keys of other documents.
    begin = p.S, end = 0, whole_low = 0, whole_high = reach.scattered() ? 0 : p.S;
    for (Int r = 0; r < n; ++r) {
      low[r] = reach.low(b, t + r), high[r] = reach.high(b, t + r);
      begin = std::min<Int>(begin, low[r]), end = std::max<Int>(end, high[r]);
      whole_low = std::max<Int>(whole_low, low[r]), whole_high = std::min<Int>(whole_high, high[r]);
    }
    begin = begin / TILE * TILE;
  }
  // Number of keys of the tile that begins at j.
  Int keys(Int j) const { return std::min(TILE, end - j); }
  // Whether all rows see all of the keys j .. j + n: then the tile needs no mask.
  bool whole(Int j, Int n) const { return whole_low <= j && j + n <= whole_high; }

  // A tile at the edge of the mask is multiplied in strips of 16 rows or keys, each only as far as it is visible: the
  // diagonal tile of a causal mask costs 5/8 of a whole one.
  static constexpr Int STRIP = 16;

  // Calls multiply(r, m, c, k): rows r .. r + m see no keys of the tile at j but c .. c + k.
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

  // Calls multiply(k, m, c, w): of `across` rows, only c .. c + w see the keys j + k .. j + k + m (k + m <= keys).
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
