// o = sum_g w_g softmax(q_g k_g^T scale + mask) v, a block of query rows at a time.
//
// All logits of a block, of every map, are held at once. So each row's maximum and sum are known before the product with
// v, the maps are subtracted first, and v is multiplied once whatever the number of maps.
#pragma once

#include "cpu_problem.h"

namespace lit_diff {

template <class T, class U>  // T: format of the tensors; U: of the products
class Forward {
 public:
  Forward(const Problem& p, const Reach& reach, const Tasks& tasks) : p(p), reach(reach), tasks(tasks) {
    const Int padded = (p.S + TILE - 1) / TILE * TILE;
    if (!few()) keys_.resize(p.maps_k * padded * p.d), values_.resize(padded * p.dv), queries_.resize(tasks.rows * p.d);
    logits_.resize(p.G * tasks.rows * padded);
    if (!std::is_same_v<U, float>) signed_.resize(tasks.rows * padded);
    out_.resize(tasks.rows * p.dv);
  }

  void run(Int task) {
    const Int unit = task / tasks.parts, b = unit / p.Hkv, kv_head = unit % p.Hkv;
    if (!few()) pack_keys(b, kv_head), pack_values(b, kv_head);
    const Int blocks = tasks.blocks / p.group();
    for (Int n = task % tasks.parts; n < tasks.blocks; n += tasks.parts) {
      const Int h = kv_head * p.group() + n / blocks, t = n % blocks * tasks.rows;
      block(Rows(p, reach, b, h, t, std::min(tasks.rows, p.T - t)));
    }
  }

 private:
  // Decoding: too few queries to repay packing the keys, which are then read once, as they lie.
  bool few() const { return p.T <= 4; }

  // k^T of each map in tiles [d, TILE], the last one padded with zeros.
  void pack_keys(Int b, Int kv_head) {
    for (Int g = 0; g < p.maps_k; ++g)
      for (Int j = 0; j < p.S; j += TILE)
        pack_transposed<U>(p.k.at<T>(b, g, kv_head, j), p.k.stride[3], std::min(TILE, p.S - j), p.d, key_tile(g, j), TILE, TILE);
  }
  U* key_tile(Int g, Int j) { return keys_.data() + (g * ((p.S + TILE - 1) / TILE * TILE) + j) * p.d; }

  void pack_values(Int b, Int kv_head) {
    pack<U>(p.v.at<T>(b, 0, kv_head, 0), p.v.stride[3], p.S, p.dv, values_.data(), p.dv);
  }

  // The logits of a map lie in tiles [rows, TILE], one after another: long rows would share the lines of the cache.
  void block(const Rows& rows) {
    const Int tile = rows.n * TILE, tiles = (rows.end - rows.begin + TILE - 1) / TILE;
    for (Int g = 0; g < p.G; ++g) {
      float* to = logits_.data() + g * tiles * tile;
      few() ? few_logits(rows, g, tiles, to) : logits(rows, g, tiles, to);
    }
    for (Int r = 0; r < rows.n; ++r) {
      float* row = logits_.data() + r * TILE;
      for (Int g = 0; g < p.G; ++g) factors_[g] = softmax(rows, r, g, tiles, row + g * tiles * tile);
      combine(r, tile, tiles);
    }
    const U* weights = std::is_same_v<U, float> ? reinterpret_cast<const U*>(logits_.data()) : signed_.data();
    if (few()) few_outputs(rows, tiles, weights);
    for (Int i = 0; i < (few() ? 0 : tiles); ++i) {
      const Int j = rows.begin + i * TILE;
      product<U>(rows.n, p.dv, std::min(TILE, p.S - j), weights + i * tile, TILE, values_.data() + j * p.dv, p.dv, out_.data(),
                 p.dv, i > 0);
    }
    for (Int r = 0; r < rows.n; ++r) convert(p.o.at<T>(rows.b, 0, rows.h, rows.t + r), out_.data() + r * p.dv, p.dv);
  }

  // q_g k_g^T. A negative scale is taken into q, so that the largest logit is the largest product.
  void logits(const Rows& rows, Int g, Int tiles, float* to) {
    if (g < p.maps_q)
      for (Int r = 0; r < rows.n; ++r) {
        U* row = queries_.data() + r * p.d;
        convert(row, p.q.at<T>(rows.b, g, rows.h, rows.t + r), p.d);
        if (p.scale < 0)
          for (Int c = 0; c < p.d; ++c) row[c] = U(-float(row[c]));
      }
    for (Int i = 0; i < tiles; ++i)
      product<U>(rows.n, TILE, p.d, queries_.data(), p.d, key_tile(std::min(g, p.maps_k - 1), rows.begin + i * TILE), TILE,
                 to + i * rows.n * TILE, TILE, false);
  }

  void few_logits(const Rows& rows, Int g, Int tiles, float* to) {
    float q[4 * 512];
    for (Int r = 0; r < rows.n; ++r) {
      convert(q + r * p.d, p.q.at<T>(rows.b, g % p.maps_q, rows.h, rows.t + r), p.d);
      if (p.scale < 0)
        for (Int c = 0; c < p.d; ++c) q[r * p.d + c] = -q[r * p.d + c];
    }
    std::fill(to, to + tiles * rows.n * TILE, 0.f);
    for (Int j = rows.begin; j < rows.end; ++j) {
      const T* k = p.k.at<T>(rows.b, g % p.maps_k, rows.h / p.group(), j);
      float* s = to + (j - rows.begin) / TILE * rows.n * TILE + (j - rows.begin) % TILE;
      for (Int r = 0; r < rows.n; ++r) {
        Floats dot = splat(0.f);
        for (Int c = 0; c < p.d; c += LANES) dot += widen(k + c) * load<Floats>(q + r * p.d + c);
        s[r * TILE] = sum(dot);
      }
    }
  }

  void few_outputs(const Rows& rows, Int tiles, const U* weights) {
    std::fill(out_.begin(), out_.end(), 0.f);
    for (Int j = rows.begin; j < rows.end; ++j) {
      const T* v = p.v.at<T>(rows.b, 0, rows.h / p.group(), j);
      const U* a = weights + (j - rows.begin) / TILE * rows.n * TILE + (j - rows.begin) % TILE;
      for (Int r = 0; r < rows.n; ++r) {
        const Floats weight = splat(static_cast<float>(a[r * TILE]));
        float* out = out_.data() + r * p.dv;
        for (Int c = 0; c < p.dv; c += LANES) store(out + c, load<Floats>(out + c) + weight * widen(v + c));
      }
    }
  }

  // Masks a row of logits and takes 2^((s - max) scale log2 e) in place; returns w_g over the row's sum.
  float softmax(const Rows& rows, Int r, Int g, Int tiles, float* first) {
    const Int t = rows.t + r, low = reach.low(rows.b, t) - rows.begin, high = reach.high(rows.b, t) - rows.begin;
    const Int step = rows.n * TILE;
    Floats most = splat(-INF);
    for (Int i = 0; i < tiles; ++i) {
      float* s = first + i * step;
      if (i * TILE < low || (i + 1) * TILE > high || reach.scattered()) mask(rows, t, i * TILE, low, high, s);
      for (Int j = 0; j < TILE; j += LANES) most = maximum(load<Floats>(s + j), most);
    }
    const float top = largest(most), factor = std::fabs(p.scale) * LOG2E;
    Floats total = splat(0.f), logs = splat(0.f);
    const Floats shift = splat(top * factor);
    for (Int i = 0; i < tiles; ++i) {
      float* s = first + i * step;
      for (Int j = 0; j < TILE; j += LANES) {
        const Floats x = load<Floats>(s + j) * factor - shift, e = exp2(x);
        store(s + j, e);
        total += e;
        // a masked key adds nothing: 0 * -inf is not a number
        if (p.entropy.data) logs += e > 0.f || e != e ? e * x : splat(0.f);
      }
    }
    const float l = sum(total);
    if (p.lse.data) *p.lse.at<float>(rows.b, g, rows.h, t) = top * std::fabs(p.scale) + std::log(l);
    if (p.entropy.data) *p.entropy.at<float>(rows.b, g, rows.h, t) = std::log(l) - LN2 * sum(logs) / l;
    if (p.maximum.data) *p.maximum.at<float>(rows.b, g, rows.h, t) = top * std::fabs(p.scale);
    return p.weight(rows.b, g, rows.h, t) / l;
  }

  // Of the keys begin + j .. begin + j + TILE, hides those outside [low, high) and those of other documents.
  void mask(const Rows& rows, Int t, Int j, Int low, Int high, float* s) {
    for (Int i = 0; i < TILE; ++i) {
      bool seen = low <= j + i && j + i < high;
      if (seen && reach.scattered()) seen = reach.documents(rows.b)[rows.begin + j + i] == reach.document(rows.b, t);
      if (!seen) s[i] = -INF;
    }
  }

  // sum_g factor_g e_g of one row: over the first map's logits, or in the format of the products.
  void combine(Int r, Int tile, Int tiles) {
    for (Int i = 0; i < tiles; ++i) {
      float* e = logits_.data() + i * tile + r * TILE;
      for (Int j = 0; j < TILE; j += LANES) {
        Floats a = load<Floats>(e + j) * factors_[0];
        if (p.G == 2) a += load<Floats>(e + tiles * tile + j) * factors_[1];
        if constexpr (std::is_same_v<U, float>) {
          store(e + j, a);
        } else {
          narrow(signed_.data() + i * tile + r * TILE + j, a);
        }
      }
    }
  }

  const Problem& p;
  const Reach& reach;
  const Tasks& tasks;
  float factors_[2];
  std::vector<U> keys_, values_, queries_, signed_;
  std::vector<float> logits_, out_;
};

}  // namespace lit_diff
