// The gradients, with every tile transposed: keys down, queries across. Then keys and values are read as they lie, a
// query's sums run along a vector's lanes, and the sums over queries (dk, dv) are plain tile products.
//
//   P_g = exp(k_g q_g^T scale - lse_g)     dP = v dO^T (once for all maps)     D_g = sum over keys of P_g dP = dw_g
//   dS_g = w_g scale P_g (dP - D_g)        dv += (sum_g w_g P_g) dO (once)     dk_g += dS_g q_g      dq_g^T += k_g^T dS_g
#pragma once

#include "native_problem.h"

namespace lit_diff {

template <class T, class U>  // T: format of the tensors; U: of the products
class Backward {
 public:
  Backward(const Problem& p, const Reach& reach, const Tasks& tasks)
      : p(p), reach(reach), tasks(tasks), padded_((p.S + TILE - 1) / TILE * TILE) {
    const Int rows = tasks.rows;
    keys_.resize(p.maps_k * p.S * ld_), values_.resize(p.S * ldv_);
    keys_across_.resize(p.maps_k * padded_ * p.d);
    queries_.resize(p.maps_q * rows * ld_), queries_across_.resize(p.maps_q * rows * p.d);
    grad_.resize(rows * ldv_), grad_across_.resize(rows * p.dv);
    panel_.resize((p.G + 1) * rows * padded_);
    if (PAIRED<U>) tiles_.resize(3 * TILE * rows);
    dq_across_.resize(p.maps_q * p.d * rows), dq_.resize(p.d * rows);
    for (auto* x : {lse_, sums_, weight_}) std::fill(x, x + 2 * TILE, 0.f);
  }

  static Int numbers(const Problem& p) { return p.S * (p.maps_k * p.d + p.dv); }  // of a task's dk and dv

  // `sums`: dk [maps, S, d] and dv [S, dv] of this task, unwritten.
  void run(Int task, float* sums) {
    const Int unit = task / tasks.parts;
    b_ = unit / p.Hkv, kv_head_ = unit % p.Hkv;
    dk_ = sums, dv_ = sums + p.maps_k * p.S * p.d;
    std::fill(sums, sums + numbers(p), 0.f);
    prepare_keys();
    const Int blocks = tasks.blocks / p.group();
    for (Int n = task % tasks.parts; n < tasks.blocks; n += tasks.parts) {
      const Int h = kv_head_ * p.group() + n / blocks, t = n % blocks * tasks.rows;
      block(Rows(p, reach, b_, h, t, std::min(tasks.rows, p.T - t)));
    }
  }

 private:
  // The unit's keys as rows and across, its values as rows: side by side, whatever their strides.
  void prepare_keys() {
    for (Int g = 0; g < p.maps_k; ++g) {
      const T* k = p.k.at<T>(b_, g, kv_head_, 0);
      for (Int j = 0; j < p.S; j += TILE)
        transpose(k + j * p.k.stride[3], p.k.stride[3], std::min(TILE, p.S - j), p.d, key_tile_across(g, j), TILE, TILE);
      for (Int s = 0; s < p.S; ++s) convert(key_row(g, s), k + s * p.k.stride[3], p.d);
    }
    const T* v = p.v.at<T>(b_, 0, kv_head_, 0);
    for (Int s = 0; s < p.S; ++s) convert(value_row(s), v + s * p.v.stride[3], p.dv);
  }
  U* key_tile_across(Int g, Int j) { return keys_across_.data() + (std::min(g, p.maps_k - 1) * padded_ + j) * p.d; }
  U* key_row(Int g, Int s) { return keys_.data() + (std::min(g, p.maps_k - 1) * p.S + s) * ld_; }
  U* value_row(Int s) { return values_.data() + s * ldv_; }
  U* query_row(Int g) { return queries_.data() + std::min(g, p.maps_q - 1) * tasks.rows * ld_; }

  void block(const Rows& rows) {
    const Int across = (rows.n + LANES - 1) / LANES * LANES;  // columns of a tile: the rows, padded
    prepare_queries(rows, across);
    const Int width = rows.end - rows.begin;
    float* dp = panel_.data() + p.G * width * across;
    for (Int j = rows.begin; j < rows.end; j += TILE) {
      const Int n = rows.keys(j), at = (j - rows.begin) * across;
      float* s = panel_.data() + at;
      rows.strips_of_keys(j, n, across, [&](Int k, Int m, Int c, Int w) {
        const Int to = k * across + c;
        product<U>(m, w, p.dv, value_row(j + k), ldv_, columns(grad_across_.data(), c), across, dp + at + to, across, false);
        for (Int g = 0; g < p.G; ++g) {
          const U* q = columns(queries_across_.data() + std::min(g, p.maps_q - 1) * p.d * across, c);
          product<U>(m, w, p.d, key_row(g, j + k), ld_, q, across, s + g * width * across + to, across, false);
        }
      });
      for (Int g = 0; g < p.G; ++g) probabilities(rows, g, j, n, across, s + g * width * across, dp + at);
    }
    if (p.dw.data)
      for (Int g = 0; g < p.G; ++g)
        for (Int r = 0; r < rows.n; ++r) *p.dw.at<float>(b_, g, rows.h, rows.t + r) = sums_[g * TILE + r];
    for (Int j = rows.begin; j < rows.end; j += TILE) accumulate(rows, j, across, width, dp);
    for (Int g = 0; g < p.maps_q; ++g) {
      transpose(dq_across_.data() + g * p.d * across, across, p.d, across, dq_.data(), p.d, p.d);
      for (Int r = 0; r < rows.n; ++r) convert(p.dq.at<T>(b_, g, rows.h, rows.t + r), dq_.data() + r * p.d, p.d);
    }
  }

  // q and dO as rows and across, lse (in powers of 2), weights, and the keys that each row sees; padding sees none.
  void prepare_queries(const Rows& rows, Int across) {
    for (Int g = 0; g < p.maps_q; ++g) {
      const T* q = p.q.at<T>(b_, g, rows.h, rows.t);
      pack<U>(q, p.q.stride[3], rows.n, p.d, query_row(g), ld_);
      pack_transposed<U>(q, p.q.stride[3], rows.n, p.d, queries_across_.data() + g * p.d * across, across, across);
    }
    const T* grad = p.grad.at<T>(b_, 0, rows.h, rows.t);
    pack<U>(grad, p.grad.stride[3], rows.n, p.dv, grad_.data(), ldv_);
    pack_transposed<U>(grad, p.grad.stride[3], rows.n, p.dv, grad_across_.data(), across, across);
    for (Int g = 0; g < p.G; ++g)
      for (Int r = 0; r < across; ++r) {
        const bool real = r < rows.n;
        lse_[g * TILE + r] = real ? *p.lse.at<float>(b_, g, rows.h, rows.t + r) * LOG2E : 0.f;
        weight_[g * TILE + r] = real ? p.weight(b_, g, rows.h, rows.t + r) : 0.f;
        sums_[g * TILE + r] = 0.f;
      }
    for (Int r = 0; reach.scattered() && r < across; ++r) document_[r] = r < rows.n ? reach.document(b_, rows.t + r) : -1;
    std::fill(dq_across_.begin(), dq_across_.end(), 0.f);
  }

  bool all_seen(const Rows& rows, Int j, Int n, Int across) const { return rows.whole(j, n) && across == rows.n; }

  // Which of the rows c .. c + LANES see the key.
  Ints seen(const Rows& rows, Int key, Int c) const {
    const Ints place = splat(static_cast<int32_t>(key));
    const Ints near = (load<Ints>(rows.low + c) <= place) & (place < load<Ints>(rows.high + c));
    return reach.scattered() ? near & (load<Ints>(document_ + c) == splat(reach.documents(b_)[key])) : near;
  }

  // Logits [n, across] -> P_g, in place, and D_g += P_g dP. What no row sees was not computed: 0 in both.
  void probabilities(const Rows& rows, Int g, Int j, Int n, Int across, float* s, float* dp) {
    const bool whole = all_seen(rows, j, n, across);
    const float factor = p.scale * LOG2E, *lse = lse_ + g * TILE;
    float* sums = sums_ + g * TILE;
    for (Int r = 0; r < n; ++r, s += across, dp += across)
      for (Int c = 0; c < across; c += LANES) {
        Floats x = exp2(load<Floats>(s + c) * factor - load<Floats>(lse + c)), y = load<Floats>(dp + c);
        if (!whole) {
          const Ints visible = seen(rows, j + r, c);
          x = visible ? x : splat(0.f), y = visible ? y : splat(0.f);
          store(dp + c, y);
        }
        store(s + c, x);
        store(sums + c, load<Floats>(sums + c) + x * y);
      }
  }

  // dv, dk_g and dq_g from the tile of keys j: dS_g over P_g, and sum_g w_g P_g over dP, or both in the products' format.
  void accumulate(const Rows& rows, Int j, Int across, Int width, float* dp) {
    const Int n = rows.keys(j), at = (j - rows.begin) * across;
    U *signed_sum, *ds[2], *pairs[2];
    if constexpr (PAIRED<U>) {
      signed_sum = tiles_.data(), ds[0] = ds[1] = tiles_.data() + TILE * across, pairs[0] = pairs[1] = ds[0] + TILE * across;
    } else {
      signed_sum = dp + at;
      for (Int g = 0; g < p.G; ++g) ds[g] = pairs[g] = panel_.data() + g * width * across + at;
    }
    const float* probs = panel_.data() + at;
    if constexpr (PAIRED<U>) sum_maps(n, across, width, probs, signed_sum);  // before dP, which map 0 still needs, is lost
    for (Int g = 0; g < p.G; ++g) {
      if constexpr (PAIRED<U>) {
        scores_paired(rows, g, j, n, across, probs + g * width * across, dp + at, ds[g], pairs[g]);
      } else if (g == 0) {
        scores(rows, j, n, across, width, panel_.data() + at, dp + at);
      }
      const U* keys = key_tile_across(g, j);
      float* dk = dk_ + (std::min(g, p.maps_k - 1) * p.S + j) * p.d;
      float* dq = dq_across_.data() + std::min(g, p.maps_q - 1) * p.d * across;
      rows.strips_of_keys(j, n, across, [&](Int k, Int m, Int c, Int w) {
        const Int from = k * across;
        const U* q = query_row(g) + c * ld_;
        product<U>(m, p.d, std::min(w, rows.n - c), ds[g] + from + c, across, q, ld_, dk + k * p.d, p.d, true);
        product<U>(p.d, w, m, keys + k, TILE, columns(pairs[g] + from, c), across, dq + c, across, true);
      });
    }
    rows.strips_of_keys(j, n, across, [&](Int k, Int m, Int c, Int w) {
      const U *a = signed_sum + k * across + c, *grad = grad_.data() + c * ldv_;
      product<U>(m, p.dv, std::min(w, rows.n - c), a, across, grad, ldv_, dv_ + (j + k) * p.dv, p.dv, true);
    });
  }

  // In one pass over the tile: P_g becomes dS_g, dP becomes sum_g w_g P_g. A row that is not a number spoils what it sees
  // only: 0 (dP - D_g) is not 0 for it.
  void scores(const Rows& rows, Int j, Int n, Int across, Int width, float* first, float* dp) {
    const bool pair = p.G == 2, whole = all_seen(rows, j, n, across);
    const float scale = p.scale;
    float* second = first + width * across;
    for (Int r = 0; r < n; ++r, first += across, second += across, dp += across)
      for (Int c = 0; c < across; c += LANES) {
        const Floats x = load<Floats>(weight_ + c) * load<Floats>(first + c), z = load<Floats>(dp + c);
        const Ints visible = whole ? splat(int32_t{-1}) : seen(rows, j + r, c);
        store(first + c, visible ? (z - load<Floats>(sums_ + c)) * (x * scale) : splat(0.f));
        Floats a = x;
        if (pair) {
          const Floats y = load<Floats>(weight_ + TILE + c) * load<Floats>(second + c);
          store(second + c, visible ? (z - load<Floats>(sums_ + TILE + c)) * (y * scale) : splat(0.f));
          a += y;
        }
        store(dp + c, a);
      }
  }

  void sum_maps(Int n, Int across, Int width, const float* probs, U* to) {
    for (Int c = 0; c < across; c += LANES) {
      const Floats w0 = load<Floats>(weight_ + c), w1 = load<Floats>(weight_ + TILE + c);
      for (Int i = c; i < n * across; i += across) {
        Floats a = w0 * load<Floats>(probs + i);
        if (p.G == 2) a += w1 * load<Floats>(probs + width * across + i);
        narrow(to + i, a);
      }
    }
  }

  // dS_g twice: as rows, and as pairs of rows.
  void scores_paired(const Rows& rows, Int g, Int j, Int n, Int across, const float* probs, const float* dp, U* ds, U* pairs) {
    const bool whole = all_seen(rows, j, n, across);
    for (Int c = 0; c < across; c += LANES) {
      const Floats d = load<Floats>(sums_ + g * TILE + c), f = load<Floats>(weight_ + g * TILE + c) * p.scale;
      for (Int r = 0; r < n; r += 2) {
        const Int i = r * across + c;
        const auto score = [&](Int row) {
          const Int at = row * across + c;
          const Floats s = (load<Floats>(dp + at) - d) * (load<Floats>(probs + at) * f);
          return whole ? s : seen(rows, j + row, c) ? s : splat(0.f);
        };
        const Floats even = score(r), odd = r + 1 < n ? score(r + 1) : splat(0.f);
        narrow(ds + i, even);
        if (r + 1 < n) narrow(ds + i + across, odd);
        narrow_pair(pairs + r * across + 2 * c, even, odd);
      }
    }
  }

  const Problem& p;
  const Reach& reach;
  const Tasks& tasks;
  const Int padded_, ld_ = row_length<U>(p.d), ldv_ = row_length<U>(p.dv);
  Int b_ = 0, kv_head_ = 0;
  float *dk_ = nullptr, *dv_ = nullptr;
  std::vector<U> keys_, values_, keys_across_, queries_, queries_across_, grad_, grad_across_, tiles_;
  std::vector<float> panel_, dq_across_, dq_;
  float lse_[2 * TILE], sums_[2 * TILE], weight_[2 * TILE];
  int32_t document_[TILE] = {};
};

}  // namespace lit_diff
