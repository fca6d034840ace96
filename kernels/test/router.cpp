// router.zk.cpp against the formulas in double; the products that the kernels leave to others are done here.
#include "check.h"

namespace {

struct Case {
    int tokens, width, classes;
    bool eda, pinned, d_state;
};

enum { PROJECTED, DOWN_BIAS, PREV, GAMMA, NORM, FC1, FC1_BIAS, FC2, FC2_BIAS, OUT, NUM_INPUTS };
const double EPS = 1e-5;

template <class T>
std::vector<T> layer(const std::vector<T>& x, const std::vector<T>& w, int outputs) {
    std::vector<T> y;
    for (int o = 0; o < outputs; o++) {
        T sum = 0.0;
        for (size_t i = 0; i < x.size(); i++) sum += through_bf16(x[i]) * through_bf16(w[o * x.size() + i]);
        y.push_back(sum);
    }
    return y;
}

template <class T>
std::vector<T> activated(std::vector<T> x, const std::vector<T>& bias) {
    for (size_t i = 0; i < x.size(); i++) {
        const T v = x[i] + bias[i];
        x[i] = v * T(0.5) * (T(1.0) + erf(v / T(std::sqrt(2.0))));
    }
    return x;
}

/// Spec 1.6 of one row: state [R] and probabilities [classes].
template <class T>
void reference(const std::vector<std::vector<T>>& x, const Case& c, int t, std::vector<T>& state, std::vector<T>& probs) {
    const int r = c.width;
    state.clear();
    probs.clear();
    T squares = 0.0;
    for (int i = 0; i < r; i++) {
        T v = x[PROJECTED][t * r + i] + x[DOWN_BIAS][i];
        if (c.eda) v += x[PREV][t * r + i] * x[GAMMA][i];
        state.push_back(v);
        squares += v * v;
    }
    std::vector<T> h;
    for (int i = 0; i < r; i++) h.push_back(state[i] / sqrt(squares / T((double)r) + T(EPS)) * x[NORM][i]);
    h = activated(layer(h, x[FC1], r), x[FC1_BIAS]);
    h = activated(layer(h, x[FC2], r), x[FC2_BIAS]);
    T sum = 0.0;
    for (const T& z : layer(h, x[OUT], c.classes)) {
        probs.push_back(exp(z));
        sum += probs.back();
    }
    for (T& p : probs) p = p / sum;
}

void one(const Case& c) {
    const std::string name = "router " + std::to_string(c.tokens) + "x" + std::to_string(c.width) + " to " + std::to_string(c.classes);
    const int T = c.tokens, R = c.width, E = c.classes, width = R <= 64 ? 64 : 256, steps = width / 16, class_tiles = (E + 15) / 16;
    Random random(T + R);
    const double sigma = 1 / std::sqrt((double)R);
    Array<float> in[NUM_INPUTS] = {random.f32(T * R), random.f32(R), random.f32(c.eda ? T * R : 0), random.f32(c.eda ? R : 0, 0.5),
                                   random.f32(R, 0.2, 1), random.f32(R * R, 2 * sigma), random.f32(R, 0.3), random.f32(R * R, 2 * sigma),
                                   random.f32(R, 0.3), random.f32(E * R, 3 * sigma)};
    Array<float> balancing = random.f32(E, 0.05), d_prob = random.f32(T), d_state = random.f32(c.d_state ? T * R : 0);
    Array<unsigned> pinned(c.pinned ? T : 0);
    for (size_t t = 0; t < pinned.size(); t++) pinned[t] = random.below(E);
    Array<unsigned char> valid(T);
    for (int t = 0; t < T; t++) valid[t] = t % 5 != 2;

    Inputs x;
    for (auto& a : in) x.push_back(numbers(a));
    std::vector<double> want_state, want_probs;
    std::vector<int> want_choice;
    std::vector<double> margin;
    for (int t = 0; t < T; t++) {
        std::vector<double> state, probs;
        reference(x, c, t, state, probs);
        want_state.insert(want_state.end(), state.begin(), state.end());
        want_probs.insert(want_probs.end(), probs.begin(), probs.end());
        std::vector<double> score;
        for (int e = 0; e < E; e++) score.push_back(probs[e] + balancing[e]);
        int best = 0;
        for (int e = 1; e < E; e++) best = score[e] > score[best] ? e : best;
        double second = -1e9;
        for (int e = 0; e < E; e++)
            if (e != best) second = std::max(second, score[e]);
        margin.push_back(score[best] - second);
        want_choice.push_back(c.pinned ? (int)pinned[t] : best);
    }

    Inputs g;
    in_all_orders(name, [&] {
        auto pack = [&](int which, int outputs, bool turned, int tiles, int steps) {
            Array<bf16_t> to((size_t)tiles * steps * 256);
            launch("router_pack", {tiles * steps}, 256, {in[which], to, outputs, R, (int)turned, tiles, steps});
            return to;
        };
        Array<bf16_t> fc1 = pack(FC1, R, false, steps, steps), fc2 = pack(FC2, R, false, steps, steps),
                      out = pack(OUT, E, false, class_tiles, steps), fc1_back = pack(FC1, R, true, steps, steps),
                      fc2_back = pack(FC2, R, true, steps, steps), out_back = pack(OUT, E, true, steps, class_tiles);
        Array<float> state(T * R), inv(T), hidden(2 * T * R), logits(T * E), probs(T * E), prob(T);
        Array<unsigned> choice(T);
        const int blocks = (T + 63) / 64;
        const std::string w = std::to_string(width);
        launch(("router_fwd_" + w).c_str(), {blocks}, 256,
               {in[PROJECTED], in[DOWN_BIAS], in[PREV], in[GAMMA], in[NORM], fc1, in[FC1_BIAS], fc2, in[FC2_BIAS], out, balancing, pinned,
                state, inv, hidden, logits, probs, choice, prob, T, R, E, (float)EPS});
        expect_close(name + " state", state, want_state, F32);
        expect_close(name + " probs", probs, want_probs, BF16);
        std::vector<int> counts(E, 0);
        for (int t = 0; t < T; t++) {
            // A near tie may fall otherwise.
            if (margin[t] > 0.02 || c.pinned) expect((int)choice[t] == want_choice[t], name + " choice");
            expect(prob[t] == probs[t * E + choice[t]], name + " probability of the choice");
            counts[choice[t]] += valid[t];
        }
        Array<int> got_counts(E);
        launch("router_counts", {E}, 256, {choice, valid, got_counts, T});
        expect(got_counts.v == counts, name + " counts");

        if (g.empty()) {
            g = gradient_of(name, [&](const auto& v) {
                using N = typename std::decay_t<decltype(v[0])>::value_type;
                N sum = 0.0;
                std::vector<N> s, p;
                for (int t = 0; t < T; t++) {
                    reference(v, c, t, s, p);
                    sum += p[choice[t]] * N((double)d_prob[t]);
                    for (int i = 0; i < R && c.d_state; i++) sum += s[i] * N((double)d_state[t * R + i]);
                }
                return sum;
            }, x);
        }
        Array<bf16_t> d_logits(T * E), work(6 * T * R);
        Array<float> d_prev(c.eda ? T * R : 0), partial(blocks * 5 * R);
        launch(("router_bwd_mlp_" + w).c_str(), {blocks}, 256,
               {choice, prob, probs, d_prob, hidden, fc2_back, out_back, d_logits, work, partial, T, R, E});
        launch(("router_bwd_state_" + w).c_str(), {blocks}, 256,
               {d_state, state, inv, in[PREV], in[GAMMA], in[NORM], fc1_back, work, d_prev, partial, T, R});
        Array<float> d_vector[5];
        const int places[] = {FC2_BIAS, FC1_BIAS, DOWN_BIAS, NORM, GAMMA};
        for (int i = 0; i < 5; i++) d_vector[i] = Array<float>(std::vector<float>(in[places[i]].size(), 0.5f));
        launch("router_params", {(5 * R + 255) / 256}, 256,
               {partial, d_vector[0], d_vector[1], d_vector[2], d_vector[3], d_vector[4], blocks, R});
        for (int i = 0; i < (c.eda ? 5 : 4); i++) {
            auto got = numbers(d_vector[i]);
            for (double& v : got) v -= 0.5;
            expect_close(name + " gradient of vector " + std::to_string(i), got, g[places[i]], PRODUCT);
        }
        const auto all = numbers(work);
        auto part = [&](int i) { return std::vector<double>(all.begin() + i * T * R, all.begin() + (i + 1) * T * R); };
        auto product = [&](const std::vector<double>& d, const std::vector<double>& a, int outputs) {
            std::vector<double> w(outputs * R, 0.0);
            for (int t = 0; t < T; t++)
                for (int o = 0; o < outputs; o++)
                    for (int i = 0; i < R; i++) w[o * R + i] += d[t * outputs + o] * a[t * R + i];
            return w;
        };
        expect_close(name + " gradient of out", product(numbers(d_logits), part(0), E), g[OUT], PRODUCT);
        expect_close(name + " gradient of fc2", product(part(1), part(2), R), g[FC2], PRODUCT);
        expect_close(name + " gradient of fc1", product(part(3), part(4), R), g[FC1], PRODUCT);
        expect_close(name + " gradient of the projection", part(5), g[PROJECTED], PRODUCT);
        if (c.eda) expect_close(name + " gradient of prev", d_prev, g[PREV], PRODUCT);
        return std::vector<std::vector<double>>{numbers(logits), numbers(state), all, numbers(d_vector[0]), numbers(d_vector[3])};
    });
}

}  // namespace

ZK_TEST(router) {
    one({1, 4, 2, false, false, false});
    one({65, 24, 5, true, false, true});
    one({63, 64, 17, true, true, false});
    one({129, 20, 33, false, true, true});
    one({66, 128, 17, true, false, true});
}
