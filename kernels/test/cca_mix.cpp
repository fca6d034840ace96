// cca_mix.zk.cpp and cca_mix_backward.zk.cpp against the formulas in double.
#include "check.h"

namespace {

struct Case {
    const char* name;
    int sequences, seq, query_heads, kv_heads, d, rotary;
    bool documents, halo, chunks;
    int channels() const { return (query_heads + kv_heads) * d; }
    int tokens() const { return sequences * seq; }
    int q() const { return query_heads * d; }
    int k() const { return kv_heads * d; }
};

struct Place {
    Array<int> doc_start, chunk_start;
    int document(int t) const { return doc_start.empty() ? 0 : doc_start[t]; }
    int start(int sequence) const { return chunk_start.empty() ? 0 : chunk_start[sequence]; }
};

enum { Q, K, CURRENT, DELAYED, HALO_Q, HALO_K, HALO_V, W0, B0, W1, B1, TEMP, NUM_INPUTS };
const char* const INPUT_NAMES[] = {"q", "k", "v current", "v delayed", "halo q", "halo k", "halo v", "conv0 weight", "conv0 bias",
                                   "conv1 weight", "conv1 bias", "temp"};

/// Spec 1.4, steps 2 to 9: q [T, q], k and v [T, k], one after the other.
template <class T>
std::vector<T> reference(const Case& c, const Place& place, const std::vector<std::vector<T>>& x, const std::vector<double>& rope) {
    const int C = c.channels(), tokens = c.tokens(), group = c.query_heads / c.kv_heads;
    // X of the token `back` before row t, if it is of t's document.
    auto is_there = [&](int t, int back) {
        const int s = t / c.seq, r = t % c.seq - back;
        if (r >= 0) return place.start(s) + r >= place.document(t);
        if (!c.halo || r < -2) return false;
        return c.chunks ? place.start(s) + r >= place.document(t) : place.document(t) == 0;
    };
    auto X = [&](int t, int back, int channel) -> T {
        if (!is_there(t, back)) return T(0.0);
        const bool of_q = channel < c.q();
        const int s = t / c.seq, r = t % c.seq - back, width = of_q ? c.q() : c.k(), at = of_q ? channel : channel - c.q();
        return r >= 0 ? x[of_q ? Q : K][(t - back) * width + at] : x[of_q ? HALO_Q : HALO_K][(s * 2 + 2 + r) * width + at];
    };
    // u of the token `back` before t; of one that is not there the bias.
    auto u = [&](int t, int back, int channel) -> T {
        T sum = x[B0][channel];
        if (is_there(t, back))
            sum += x[W0][2 * channel] * X(t, back + 1, channel) + x[W0][2 * channel + 1] * X(t, back, channel);
        return through_bf16(sum);
    };
    std::vector<T> out[3];
    for (int t = 0; t < tokens; t++) {
        std::vector<T> us[2], y;
        for (int channel = 0; channel < C; channel++)
            for (int back = 0; back < 2; back++) us[back].push_back(u(t, back, channel));
        for (int o = 0; o < C; o++) {
            T sum = x[B1][o];
            for (int i = 0; i < c.d; i++)
                for (int tap = 0; tap < 2; tap++)
                    sum += through_bf16(x[W1][(o * c.d + i) * 2 + tap]) * us[1 - tap][o / c.d * c.d + i];
            y.push_back(sum);
        }
        for (int a = 0; a < c.query_heads; a++) {
            for (int j = 0; j < c.d; j++) {
                const int g = a / group;
                const T mean = T(0.5) * (x[Q][t * c.q() + a * c.d + j] + x[K][t * c.k() + g * c.d + j]);
                y[a * c.d + j] += mean;
                y[c.q() + g * c.d + j] += mean / T((double)group);
            }
        }
        for (int h = 0; h < c.query_heads + c.kv_heads; h++) {
            T squares = 0.0;
            for (int j = 0; j < c.d; j++) squares += y[h * c.d + j] * y[h * c.d + j];
            const T by = T(std::sqrt((double)c.d)) / sqrt(squares);
            std::vector<T> v;
            for (int j = 0; j < c.d; j++) v.push_back(y[h * c.d + j] * by * (h < c.query_heads ? T(1.0) : x[TEMP][h - c.query_heads]));
            const int half = c.rotary / 2, position = place.start(t / c.seq) + t % c.seq;
            for (int j = 0; j < c.d; j++) {
                const double *cosine = &rope[position * c.rotary], *sine = cosine + half;
                T r = v[j];
                if (j < half) r = v[j] * T(cosine[j]) - v[j + half] * T(sine[j]);
                else if (j < c.rotary) r = v[j] * T(cosine[j - half]) + v[j - half] * T(sine[j - half]);
                out[h < c.query_heads ? 0 : 1].push_back(r);
            }
        }
        const int half = c.k() / 2;
        for (int i = 0; i < half; i++) out[2].push_back(x[CURRENT][t * half + i]);
        for (int i = 0; i < half; i++) {
            if (!is_there(t, 1)) out[2].push_back(T(0.0));
            else out[2].push_back(t % c.seq ? x[DELAYED][(t - 1) * half + i] : x[HALO_V][t / c.seq * half + i]);
        }
    }
    for (int i = 1; i < 3; i++) out[0].insert(out[0].end(), out[i].begin(), out[i].end());
    return out[0];
}

std::vector<double> slice(const std::vector<double>& v, size_t from, size_t count) { return {v.begin() + from, v.begin() + from + count}; }

void one(const Case& c) {
    const std::string name = std::string("cca_mix ") + c.name, d = std::to_string(c.d);
    Random random(c.seq * 10 + c.d);
    const int tokens = c.tokens(), C = c.channels(), heads = c.query_heads + c.kv_heads, positions = c.seq + 20;
    Place place;
    if (c.chunks) {
        place.chunk_start = Array<int>(c.sequences);
        for (int s = 0; s < c.sequences; s++) place.chunk_start[s] = 5 * s;
    }
    if (c.documents) {
        place.doc_start = Array<int>(tokens);
        for (int s = 0; s < c.sequences; s++) {
            // Of chunks the first row's document begins 0, 1, 2 .. tokens before.
            int begun = c.chunks ? std::max(0, place.start(s) - s % 4) : 0;
            for (int r = 0; r < c.seq; r++) {
                if (r > 0 && random.below(3) == 0) begun = place.start(s) + r;
                place.doc_start[s * c.seq + r] = begun;
            }
        }
    }
    const size_t halo_rows = c.halo ? 2 * c.sequences : 0;
    Array<float> in[NUM_INPUTS] = {
        random.f32(tokens * c.q()), random.f32(tokens * c.k()), random.f32(tokens * c.k() / 2), random.f32(tokens * c.k() / 2),
        random.f32(halo_rows * c.q()), random.f32(halo_rows * c.k()), random.f32(halo_rows / 2 * c.k() / 2),
        random.f32(C * 2), random.f32(C, 0.5), random.f32(C * c.d * 2, 1 / std::sqrt(2.0 * c.d)), random.f32(C, 0.3),
        random.f32(c.kv_heads, 0.3, 1.5)};
    std::vector<double> angles;
    Array<float> rope(positions * c.rotary);
    for (int p = 0; p < positions; p++)
        for (int j = 0; j < c.rotary; j++) {
            const double angle = p * std::pow(100.0, -2.0 * (j % (c.rotary / 2)) / c.rotary);
            rope[p * c.rotary + j] = (float)(j < c.rotary / 2 ? std::cos(angle) : std::sin(angle));
            angles.push_back(rope[p * c.rotary + j]);
        }
    Array<float> dq = random.f32(tokens * c.q()), dk = random.f32(tokens * c.k()), dv = random.f32(tokens * c.k());

    Inputs x;
    for (auto& a : in) x.push_back(numbers(a));
    Rounding::the().on = true;
    const std::vector<double> want = reference(c, place, x, angles);
    std::vector<double> d_out = numbers(dq);
    for (auto* a : {&dk, &dv}) {
        const auto n = numbers(*a);
        d_out.insert(d_out.end(), n.begin(), n.end());
    }
    const Inputs g = gradient_of(name, [&](const auto& in) {
        using T = typename std::decay_t<decltype(in[0])>::value_type;
        const std::vector<T> out = reference(c, place, in, angles);
        T sum = 0.0;
        for (size_t i = 0; i < out.size(); i++) sum += out[i] * T(d_out[i]);
        return sum;
    }, x);

    in_all_orders(name, [&] {
        Array<int> history(4 * tokens);
        launch("cca_mix_history", {(tokens + 255) / 256}, 256, {place.doc_start, place.chunk_start, history, tokens, c.seq});
        Array<bf16_t> pack_forward(2 * C * c.d), pack_backward(2 * C * c.d);
        launch("cca_mix_pack", {(2 * C * c.d + 255) / 256}, 256, {in[W1], pack_forward, pack_backward, heads, c.d});
        const std::vector<Arg> common = {in[Q], in[K], in[HALO_Q], in[HALO_K], in[W0], in[B0], history, tokens, c.query_heads, c.kv_heads};
        auto with = [&](std::vector<Arg> more) {
            std::vector<Arg> args = common;
            args.insert(args.end(), more.begin(), more.end());
            return args;
        };
        Array<bf16_t> q(tokens * c.q()), k(tokens * c.k()), v(tokens * c.k());
        Array<float> saved(tokens * C);
        launch(("cca_mix_fwd_" + d).c_str(), {(tokens + 63) / 64, c.kv_heads}, 256,
               with({pack_forward, in[B1], in[TEMP], rope, c.rotary, q, k, saved}));
        launch("cca_mix_values_fwd", {(tokens * c.k() + 255) / 256}, 256,
               {in[CURRENT], in[DELAYED], in[HALO_V], history, v, tokens, c.k()});
        const size_t nq = tokens * c.q(), nk = tokens * c.k();
        expect_close(name + " q", q, slice(want, 0, nq), BF16);
        expect_close(name + " k", k, slice(want, nq, nk), BF16);
        expect_close(name + " v", v, slice(want, nq + nk, nk), BF16);

        const int norm_blocks = (tokens + 15) / 16, input_blocks = (tokens + 62) / 63, per_weight_block = 64;
        const int weight_blocks = (tokens + per_weight_block - 1) / per_weight_block;
        Array<float> dy(tokens * C), input_partial((size_t)input_blocks * C * 2), bias_partial(weight_blocks * C),
            weight_partial((size_t)weight_blocks * C * 2 * c.d), halo_partial(c.halo ? c.sequences * C * 2 : 0);
        Array<double> temp_partial(norm_blocks * c.kv_heads);
        launch("cca_mix_bwd_norm", {norm_blocks}, 256,
               {dq, dk, saved, in[TEMP], history, rope, c.rotary, dy, temp_partial, tokens, c.query_heads, c.kv_heads, c.d});
        Array<bf16_t> d_in[4] = {Array<bf16_t>(nq), Array<bf16_t>(nk), Array<bf16_t>(nk / 2), Array<bf16_t>(nk / 2)};
        launch("cca_mix_bwd_values", {((int)nk / 2 + 255) / 256}, 256, {dv, history, d_in[2], d_in[3], tokens, c.k()});
        launch(("cca_mix_bwd_input_" + d).c_str(), {input_blocks, c.kv_heads}, 256,
               with({pack_backward, dy, d_in[0], d_in[1], input_partial}));
        launch(("cca_mix_bwd_weight_" + d).c_str(), {weight_blocks, heads}, 256, with({dy, weight_partial, bias_partial, per_weight_block}));
        Array<float> d_halo[3] = {Array<float>(in[HALO_Q].size()), Array<float>(in[HALO_K].size()), Array<float>(in[HALO_V].size())};
        if (c.halo)
            launch("cca_mix_bwd_halo", {c.sequences, heads}, 256,
                   with({in[W1], dy, dv, d_halo[0], d_halo[1], d_halo[2], halo_partial, c.seq, c.d}));
        Array<float> d_param[5];
        for (int i = 0; i < 5; i++) d_param[i] = Array<float>(std::vector<float>(in[W0 + i].size(), 0.25f));
        launch("cca_mix_bwd_conv1", {(2 * C * c.d + 255) / 256}, 256, {weight_partial, d_param[2], weight_blocks, C, c.d});
        launch("cca_mix_bwd_params", {heads}, 256,
               {input_partial, input_blocks, halo_partial, c.halo ? c.sequences : 0, bias_partial, weight_blocks, temp_partial, norm_blocks,
                in[W1], d_param[0], d_param[1], d_param[3], d_param[4], c.query_heads, c.kv_heads, c.d});
        std::vector<std::vector<double>> results = {numbers(q), numbers(k), numbers(v)};
        for (int i = 0; i < NUM_INPUTS; i++) {
            std::vector<double> got = i < 4 ? numbers(d_in[i]) : i < 7 ? numbers(d_halo[i - 4]) : numbers(d_param[i - 7]);
            if (i >= W0)
                for (double& v : got) v -= 0.25;
            if (!got.empty()) expect_close(name + " gradient of " + INPUT_NAMES[i], got, g[i], 2 * BF16);
            results.push_back(got);
        }
        return results;
    });
}

}  // namespace

ZK_TEST(cca_mix) {
    one({"one token", 1, 1, 1, 1, 16, 8, false, false, false});
    one({"one token with a halo", 2, 1, 2, 1, 16, 8, false, true, false});
    one({"65 tokens, groups of 4", 1, 65, 8, 2, 16, 8, false, false, false});
    one({"two of 63, documents, a halo", 2, 63, 2, 2, 32, 32, true, true, false});
    one({"five chunks of 26, documents", 5, 26, 2, 1, 16, 16, true, true, true});
    one({"129 tokens, one head", 1, 129, 1, 1, 64, 32, true, false, false});
    one({"64 tokens of 128", 1, 64, 1, 1, 128, 64, true, false, false});
}
