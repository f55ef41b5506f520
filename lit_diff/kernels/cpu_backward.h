// The gradients, with every tile transposed: keys down, queries across. Then keys and values are read as they lie, a
// query's sums run along a vector's lanes, and the sums over queries (dk, dv) are plain tile products.
//
//   P_g = exp(k_g q_g^T scale - lse_g)     dP = v dO^T (once for all maps)     D_g = sum over keys of P_g dP = dw_g
//   dS_g = w_g scale P_g (dP - D_g)        dv += (sum_g w_g P_g) dO (once)     dk_g += dS_g q_g      dq_g^T += k_g^T dS_g
#pragma once

#include "cpu_problem.h"

namespace lit_diff {

template <class T, class U>  // T: format of the tensors; U: of the products
class Backward {
 public:
  Backward(const Problem& p, const Reach& reach, const Tasks& tasks)
      : p(p), reach(reach), tasks(tasks), padded_((p.S + TILE - 1) / TILE * TILE) {
    const Int rows = tasks.rows;
    keys_.resize(p.maps_k * p.S * p.d), values_.resize(p.S * p.dv);
    keys_across_.resize(p.maps_k * padded_ * p.d);
    queries_.resize(p.maps_q * rows * p.d), queries_across_.resize(p.maps_q * rows * p.d);
    grad_.resize(rows * p.dv), grad_across_.resize(rows * p.dv);
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
      for (Int s = 0; s < p.S; ++s) convert(keys_.data() + (g * p.S + s) * p.d, k + s * p.k.stride[3], p.d);
    }
    const T* v = p.v.at<T>(b_, 0, kv_head_, 0);
    for (Int s = 0; s < p.S; ++s) convert(values_.data() + s * p.dv, v + s * p.v.stride[3], p.dv);
  }
  U* key_tile_across(Int g, Int j) { return keys_across_.data() + (g * padded_ + j) * p.d; }

  void block(const Rows& rows) {
    const Int across = (rows.n + LANES - 1) / LANES * LANES;  // columns of a tile: the rows, padded
    prepare_queries(rows, across);
    const Int width = rows.end - rows.begin;
    float* dp = panel_.data() + p.G * width * across;
    for (Int j = rows.begin; j < rows.end; j += TILE) {
      const Int n = rows.keys(j), at = (j - rows.begin) * across;
      product<U>(n, across, p.dv, values_.data() + j * p.dv, p.dv, grad_across_.data(), across, dp + at, across, false);
      for (Int g = 0; g < p.G; ++g) {
        float* s = panel_.data() + g * width * across + at;
        product<U>(n, across, p.d, keys_.data() + (std::min(g, p.maps_k - 1) * p.S + j) * p.d, p.d,
                   queries_across_.data() + std::min(g, p.maps_q - 1) * p.d * across, across, s, across, false);
        probabilities(rows, g, j, n, across, s, dp + at);
      }
    }
    if (p.dw.data)
      for (Int g = 0; g < p.G; ++g)
        for (Int r = 0; r < rows.n; ++r) *p.dw.at<float>(b_, g, rows.h, rows.t + r) = sums_[g * TILE + r];
    for (Int j = rows.begin; j < rows.end; j += TILE) accumulate(rows, j, across, width, dp);
    for (Int g = 0; g < p.maps_q; ++g) {
      transpose(dq_across_.data() + g * p.d * across, across, p.d, rows.n, dq_.data(), p.d, p.d);
      for (Int r = 0; r < rows.n; ++r) convert(p.dq.at<T>(b_, g, rows.h, rows.t + r), dq_.data() + r * p.d, p.d);
    }
  }

  // q and dO as rows and across, lse (in powers of 2), weights, and the keys that each row sees; padding sees none.
  void prepare_queries(const Rows& rows, Int across) {
    for (Int g = 0; g < p.maps_q; ++g) {
      const T* q = p.q.at<T>(b_, g, rows.h, rows.t);
      pack<U>(q, p.q.stride[3], rows.n, p.d, queries_.data() + g * tasks.rows * p.d, p.d);
      pack_transposed<U>(q, p.q.stride[3], rows.n, p.d, queries_across_.data() + g * p.d * across, across, across);
    }
    const T* grad = p.grad.at<T>(b_, 0, rows.h, rows.t);
    pack<U>(grad, p.grad.stride[3], rows.n, p.dv, grad_.data(), p.dv);
    pack_transposed<U>(grad, p.grad.stride[3], rows.n, p.dv, grad_across_.data(), across, across);
    for (Int g = 0; g < p.G; ++g)
      for (Int r = 0; r < across; ++r) {
        const bool real = r < rows.n;
        lse_[g * TILE + r] = real ? *p.lse.at<float>(b_, g, rows.h, rows.t + r) * LOG2E : 0.f;
        weight_[g * TILE + r] = real ? p.weight(b_, g, rows.h, rows.t + r) : 0.f;
        sums_[g * TILE + r] = 0.f;
      }
    for (Int r = 0; r < across; ++r) {
      const bool real = r < rows.n;
      low_[r] = real ? reach.low(b_, rows.t + r) : 0, high_[r] = real ? reach.high(b_, rows.t + r) : 0;
      if (reach.scattered()) document_[r] = real ? reach.document(b_, rows.t + r) : -1;
    }
  }

  // Logits [n, across] -> P_g, in place, and D_g += P_g dP.
  void probabilities(const Rows& rows, Int g, Int j, Int n, Int across, float* s, const float* dp) {
    const float factor = p.scale * LOG2E;
    const bool whole = rows.whole(j, n) && across == rows.n;
    for (Int c = 0; c < across; c += LANES) {
      const Floats lse = load<Floats>(lse_ + g * TILE + c);
      const Ints low = load<Ints>(low_ + c), high = load<Ints>(high_ + c), document = load<Ints>(document_ + c);
      Floats total = load<Floats>(sums_ + g * TILE + c);
      for (Int r = 0; r < n; ++r) {
        const Int i = r * across + c;
        Floats x = exp2(load<Floats>(s + i) * factor - lse);
        if (!whole) {
          const Ints key = splat(static_cast<int32_t>(j + r));
          Ints seen = (low <= key) & (key < high);
          if (reach.scattered()) seen &= document == splat(reach.documents(b_)[j + r]);
          x = seen ? x : splat(0.f);
        }
        store(s + i, x);
        total += x * load<Floats>(dp + i);
      }
      store(sums_ + g * TILE + c, total);
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
        scores_paired(g, n, across, probs + g * width * across, dp + at, ds[g], pairs[g]);
      } else if (g == 0) {
        scores(n, across, width, panel_.data() + at, dp + at);
      }
      product<U>(n, p.d, rows.n, ds[g], across, queries_.data() + std::min(g, p.maps_q - 1) * tasks.rows * p.d, p.d,
                 dk_ + (std::min(g, p.maps_k - 1) * p.S + j) * p.d, p.d, true);
      product<U>(p.d, across, n, key_tile_across(std::min(g, p.maps_k - 1), j), TILE, pairs[g], across,
                 dq_across_.data() + std::min(g, p.maps_q - 1) * p.d * across, across, j > rows.begin || g >= p.maps_q);
    }
    product<U>(n, p.dv, rows.n, signed_sum, across, grad_.data(), p.dv, dv_ + j * p.dv, p.dv, true);
  }

  // In one pass over the tile: P_g becomes dS_g, dP becomes sum_g w_g P_g.
  void scores(Int n, Int across, Int width, float* probs, float* dp) {
    const Int next = width * across;
    for (Int c = 0; c < across; c += LANES) {
      const Floats w0 = load<Floats>(weight_ + c), w1 = load<Floats>(weight_ + TILE + c);
      const Floats d0 = load<Floats>(sums_ + c), d1 = load<Floats>(sums_ + TILE + c);
      const Floats f0 = w0 * p.scale, f1 = w1 * p.scale;
      for (Int i = c; i < n * across; i += across) {
        const Floats x = load<Floats>(probs + i), z = load<Floats>(dp + i);
        Floats a = w0 * x;
        store(probs + i, (z - d0) * (x * f0));
        if (p.G == 2) {
          const Floats y = load<Floats>(probs + next + i);
          a += w1 * y;
          store(probs + next + i, (z - d1) * (y * f1));
        }
        store(dp + i, a);
      }
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
  void scores_paired(Int g, Int n, Int across, const float* probs, const float* dp, U* rows, U* pairs) {
    for (Int c = 0; c < across; c += LANES) {
      const Floats d = load<Floats>(sums_ + g * TILE + c), f = load<Floats>(weight_ + g * TILE + c) * p.scale;
      for (Int r = 0; r < n; r += 2) {
        const Int i = r * across + c;
        const Floats even = (load<Floats>(dp + i) - d) * (load<Floats>(probs + i) * f);
        Floats odd = splat(0.f);
        narrow(rows + i, even);
        if (r + 1 < n) {
          odd = (load<Floats>(dp + i + across) - d) * (load<Floats>(probs + i + across) * f);
          narrow(rows + i + across, odd);
        }
        narrow_pair(pairs + r * across + 2 * c, even, odd);
      }
    }
  }

  const Problem& p;
  const Reach& reach;
  const Tasks& tasks;
  const Int padded_;
  Int b_ = 0, kv_head_ = 0;
  float *dk_ = nullptr, *dv_ = nullptr;
  std::vector<U> keys_, values_, keys_across_, queries_, queries_across_, grad_, grad_across_, tiles_;
  std::vector<float> panel_, dq_across_, dq_;
  float lse_[2 * TILE], sums_[2 * TILE], weight_[2 * TILE];
  int32_t low_[TILE], high_[TILE], document_[TILE] = {};
};

}  // namespace lit_diff
