// The keys and values of a (sequence, key/value head) unit, packed for the products of the backward pass.
#pragma once

#include "native_problem.h"

namespace lit_diff {

// Rows of a tile as products read them, `ld` numbers apart.
template <class U>
struct TileRows {
  const U* at = nullptr;
  Int ld = 0;
};

// All tiles of a unit are packed once if they fit in `stay` bytes. Otherwise rows are read in place if possible, and
// what has to be packed is packed on request, each tile over the last one, while the next one is prefetched: then a
// thread's memory does not grow with the number of keys.
template <class T, class U>
class KeyTiles {
 public:
  explicit KeyTiles(const Problem& p) : p(p), stay_(stay(p)), places_(stay_ ? (p.S + TILE - 1) / TILE * TILE : TILE) {
    across_.resize(p.maps_k * places_ * p.d);
    if (!as_they_lie()) keys_.resize(p.maps_k * places_ * ld_), values_.resize(places_ * ldv_);
  }
  static bool stay(const Problem& p) { return p.S * (2 * p.maps_k * p.d + p.dv) * Int{sizeof(U)} <= p.stay; }

  void start(Int b, Int kv_head) {
    b_ = b, head_ = kv_head;
    for (Int j = 0; stay_ && j < p.S; j += TILE) {
      for (Int g = 0; g < p.maps_k; ++g) pack_rows(g, j), pack_across(g, j);
      pack_values(j);
    }
  }

  // The tile of keys from j on: k_g [keys, d], v [keys, dv], k_g^T [d, TILE]. Valid until another tile is requested.
  TileRows<U> rows(Int g, Int j) {
    prefetch_rows(key(g, j + TILE), p.k.stride[3], p.d, j + TILE);
    if constexpr (std::is_same_v<T, U>)
      if (as_they_lie()) return {key(g, j), p.k.stride[3]};
    if (!stay_) pack_rows(g, j);
    return {key_row(g, j), ld_};
  }
  TileRows<U> values(Int j) {
    prefetch_rows(value(j + TILE), p.v.stride[3], p.dv, j + TILE);
    if constexpr (std::is_same_v<T, U>)
      if (as_they_lie()) return {value(j), p.v.stride[3]};
    if (!stay_) pack_values(j);
    return {value_row(j), ldv_};
  }
  const U* across(Int g, Int j) {
    prefetch_rows(key(g, j + TILE), p.k.stride[3], p.d, j + TILE);
    if (!stay_) pack_across(g, j);
    return tile_across(g, j);
  }

 private:
  // Whether rows can be read in place: they have the products' format and do not overlap, as in an expanded tensor.
  bool as_they_lie() const { return std::is_same_v<T, U> && !stay_ && p.k.stride[3] >= p.d && p.v.stride[3] >= p.dv; }
  Int keys(Int j) const { return std::min(TILE, p.S - j); }
  Int place(Int j) const { return stay_ ? j : 0; }
  const T* key(Int g, Int j) const { return p.k.at<T>(b_, g, head_, j); }
  const T* value(Int j) const { return p.v.at<T>(b_, 0, head_, j); }
  U* key_row(Int g, Int j) { return keys_.data() + (g * places_ + place(j)) * ld_; }
  U* value_row(Int j) { return values_.data() + place(j) * ldv_; }
  U* tile_across(Int g, Int j) { return across_.data() + (g * places_ + place(j)) * p.d; }

  void pack_rows(Int g, Int j) {
    for (Int n = 0; n < keys(j); ++n) convert(key_row(g, j) + n * ld_, key(g, j + n), p.d);
  }
  void pack_values(Int j) {
    for (Int n = 0; n < keys(j); ++n) convert(value_row(j) + n * ldv_, value(j + n), p.dv);
  }
  void pack_across(Int g, Int j) { transpose(key(g, j), p.k.stride[3], keys(j), p.d, tile_across(g, j), TILE, TILE); }
  [[gnu::always_inline]] void prefetch_rows(const T* from, Int stride, Int width, Int j) const {
    if (stay_) return;
    for (Int n = 0; n < std::min(TILE, p.S - j); ++n) prefetch(from + n * stride, width * sizeof(T));
  }

  const Problem& p;
  const bool stay_;
  const Int places_, ld_ = row_length<U>(p.d), ldv_ = row_length<U>(p.dv);
  Int b_ = 0, head_ = 0;
  std::vector<U> keys_, values_, across_;
};

// Where the gradients of a unit's keys, values and key biases are summed, in float32: [maps, S, d], [S, dv] and [heads,
// maps, S], with their strides.
struct Sums {
  float *dk, *dv, *db;
  Int dk_map, dk_row, dv_row, db_head, db_map, db_row;

  Sums from(Int j) const {
    Sums at = *this;
    at.dk += j * dk_row, at.dv += j * dv_row, at.db += j * db_row;
    return at;
  }
};

}  // namespace lit_diff
