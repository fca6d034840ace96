// attention.zk.cpp and attention_padding.zk.cpp against the formulas in double.
#include "check.h"

namespace {

struct Case {
    const char* name;
    int sequences, chunks, seq, keys, heads, kv_heads, d, window;
    bool documents, padding;
};

struct Masks {
    Array<int> doc_start, chunk_start;
    Array<unsigned char> key_valid;
};

/// q [T, heads, d], k and v [sequences * keys, kv_heads, d] -> out [T, heads, d].
template <class T>
std::vector<T> reference(const Case& c, const Masks& m, const std::vector<T>& q, const std::vector<T>& k, const std::vector<T>& v) {
    const int rows = c.chunks * c.seq, group = c.heads / c.kv_heads;
    std::vector<T> out;
    for (int t = 0; t < c.sequences * rows; t++) {
        const int sequence = t / rows, position = (m.chunk_start.empty() ? 0 : m.chunk_start[t / c.seq]) + t % c.seq;
        for (int h = 0; h < c.heads; h++) {
            auto at = [&](int key) { return ((sequence * c.keys + key) * c.kv_heads + h / group) * c.d; };
            std::vector<int> seen;
            for (int key = 0; key <= position; key++) {
                if (!m.doc_start.empty() && key < m.doc_start[t]) continue;
                if (c.window && key <= position - c.window) continue;
                if (!m.key_valid.empty() && !m.key_valid[sequence * c.keys + key]) continue;
                seen.push_back(key);
            }
            // A row that sees nothing weighs all keys alike; its scores count, as they would under a huge negative mask.
            const bool blind = seen.empty();
            for (int key = 0; blind && key < c.keys; key++) seen.push_back(key);
            std::vector<T> weight;
            T sum = 0.0;
            for (int key : seen) {
                T score = 0.0;
                for (int i = 0; i < c.d; i++) score += q[(t * c.heads + h) * c.d + i] * k[at(key) + i];
                score = score / T(std::sqrt((double)c.d));
                // Its value is hidden, its derivative is not.
                weight.push_back(exp(blind ? score - T(value(score)) : score));
                sum += weight.back();
            }
            for (int i = 0; i < c.d; i++) {
                T o = 0.0;
                for (size_t j = 0; j < seen.size(); j++) o += weight[j] / sum * v[at(seen[j]) + i];
                out.push_back(o);
            }
        }
    }
    return out;
}

void one(const Case& c) {
    const std::string name = std::string("attention ") + c.name;
    Random random(c.seq * 100 + c.d);
    const int rows = c.chunks * c.seq, tokens = c.sequences * rows, units = c.sequences * c.kv_heads, columns = rows * (c.heads / c.kv_heads);
    Masks m;
    if (c.keys != rows || c.chunks > 1) {
        // Chunks with gaps between them, as context parallelism in zigzag has.
        m.chunk_start = Array<int>(c.sequences * c.chunks);
        for (int i = 0; i < c.sequences * c.chunks; i++)
            m.chunk_start[i] = i % c.chunks + 1 == c.chunks ? c.keys - c.seq : i % c.chunks * (c.seq + 3) + 2;
    }
    if (c.documents) {
        m.doc_start = Array<int>(tokens);
        for (int s = 0; s < c.sequences; s++) {
            std::vector<int> start(c.keys, 0);
            for (int p = 1; p < c.keys; p++) start[p] = random.below(3) == 0 || p == c.keys / 2 ? p : start[p - 1];
            for (int r = 0; r < rows; r++) {
                const int t = s * rows + r;
                m.doc_start[t] = start[(m.chunk_start.empty() ? 0 : m.chunk_start[t / c.seq]) + t % c.seq];
            }
        }
    }
    if (c.padding) {
        m.key_valid = Array<unsigned char>(c.sequences * c.keys);
        for (int s = 0; s < c.sequences; s++)
            for (int key = 0; key < c.keys; key++) m.key_valid[s * c.keys + key] = key >= 3 + s && key != c.keys - 1;
    }
    Array<bf16_t> q = random.bf16((size_t)tokens * c.heads * c.d), k = random.bf16((size_t)c.sequences * c.keys * c.kv_heads * c.d),
                  v = random.bf16(k.size()), d_out = random.bf16(q.size());

    const Inputs x = {numbers(q), numbers(k), numbers(v)};
    const std::vector<double> want = reference(c, m, x[0], x[1], x[2]);
    auto loss = [&](const auto& in) {
        using T = typename std::decay_t<decltype(in[0])>::value_type;
        const std::vector<T> out = reference(c, m, in[0], in[1], in[2]);
        T sum = 0.0;
        for (size_t i = 0; i < out.size(); i++) sum += out[i] * T((double)from_bf16(d_out[i]));
        return sum;
    };
    // Differences cannot see a derivative whose value is hidden.
    const Inputs g = c.padding ? tape_gradient(loss, x) : gradient_of(name, loss, x);

    auto with_sight = [&](std::vector<Arg> args, bool needs_d) {
        if (needs_d) args.push_back(c.d);
        for (Arg a : std::vector<Arg>{m.doc_start, m.chunk_start, m.key_valid, rows, c.seq, c.keys, c.heads, c.kv_heads, 0, c.window,
                                      (float)(1 / std::sqrt((double)c.d))})
            args.push_back(a);
        return args;
    };
    const std::string d = std::to_string(c.d);
    const Grid by_columns = {(columns + 127) / 128, units}, by_keys = {(c.keys + 127) / 128, units};
    in_all_orders(name, [&] {
        Array<bf16_t> out(q.size());
        Array<float> lse(tokens * c.heads), delta(tokens * c.heads), dq(q.size()), dk(k.size()), dv(v.size());
        launch(("attention_fwd_" + d).c_str(), by_columns, 256, with_sight({q, k, v, out, lse}, false));
        if (c.padding) launch("attention_padding_fwd", {columns, units}, 64, with_sight({v, out, lse}, true));
        expect_close(name + " out", out, want, 1.5 * BF16);
        launch("attention_bwd_delta", {(tokens * c.heads + 3) / 4}, 256, {out, d_out, delta, tokens * c.heads, c.d});
        launch(("attention_bwd_q_" + d).c_str(), by_columns, 256, with_sight({q, k, v, lse, delta, d_out, dq}, false));
        launch(("attention_bwd_kv_" + d).c_str(), by_keys, 256, with_sight({q, k, v, lse, delta, d_out, dk, dv}, false));
        if (c.padding) {
            launch("attention_padding_bwd_q", {columns, units}, 64, with_sight({k, v, lse, delta, d_out, dq}, true));
            launch("attention_padding_bwd_kv", {c.keys, units}, 64, with_sight({q, v, lse, delta, d_out, dk, dv}, true));
        }
        expect_close(name + " dq", dq, g[0], PRODUCT);
        expect_close(name + " dk", dk, g[1], PRODUCT);
        expect_close(name + " dv", dv, g[2], PRODUCT);
        return std::vector<std::vector<double>>{numbers(out), numbers(lse), numbers(dq), numbers(dk), numbers(dv)};
    });
}

}  // namespace

ZK_TEST(attention) {
    one({"one token", 1, 1, 1, 1, 1, 1, 16, 0, false, false});
    one({"63 tokens, groups of 4", 1, 1, 63, 63, 8, 2, 16, 0, false, false});
    one({"65 tokens, documents", 2, 1, 65, 65, 4, 2, 32, 0, true, false});
    one({"129 tokens, window of 1", 1, 1, 129, 129, 1, 1, 16, 1, false, false});
    one({"129 tokens, window of 33", 1, 1, 129, 129, 2, 1, 64, 33, true, false});
    one({"130 tokens of 128", 1, 1, 130, 130, 1, 1, 128, 0, false, false});
    one({"three chunks of 20 in 100", 2, 3, 20, 100, 2, 1, 16, 0, true, false});
    one({"padding", 2, 1, 40, 40, 2, 1, 16, 0, false, true});
}
