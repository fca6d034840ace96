// residual_norm.zk.cpp against the formulas in double.
#include "check.h"

namespace {

struct Shape {
    int rows, d;
    const char* suffix;
    bool merges, has_dy;
};

const double EPS = 1e-5;

/// branch, stream, s1, b1, s2, b2, w -> y, h.
template <class T>
void reference(const std::vector<std::vector<T>>& x, Shape s, std::vector<T>& y, std::vector<T>& h) {
    y.clear();
    h.clear();
    for (int r = 0; r < s.rows; r++) {
        T squares = 0.0;
        for (int c = 0; c < s.d; c++) {
            const int i = r * s.d + c;
            y.push_back(s.merges ? (x[0][i] + x[3][c]) * x[2][c] + (x[1][i] + x[5][c]) * x[4][c] : x[1][i]);
            squares += y[i] * y[i];
        }
        const T rms = sqrt(squares / T((double)s.d) + T(EPS));
        for (int c = 0; c < s.d; c++) h.push_back(y[r * s.d + c] / rms * x[6][c]);
    }
}

void one(Shape s) {
    const std::string name = "residual_norm " + std::to_string(s.rows) + "x" + std::to_string(s.d) + (s.merges ? "" : " norm only");
    Random random(s.rows * 1000 + s.d);
    const size_t n = (size_t)s.rows * s.d;
    Array<bf16_t> branch = random.bf16(s.merges ? n : 0);
    Array<float> stream = random.f32(n), s1 = random.f32(s.d, 0.2, 1), b1 = random.f32(s.d, 0.2), s2 = random.f32(s.d, 0.2, 1),
                 b2 = random.f32(s.d, 0.2), w = random.f32(s.d, 0.2, 1), dh = random.f32(n), dy = random.f32(s.has_dy ? n : 0);
    const Inputs x = {numbers(branch), numbers(stream), numbers(s1), numbers(b1), numbers(s2), numbers(b2), numbers(w)};

    std::vector<double> want_y, want_h;
    reference(x, s, want_y, want_h);
    const Inputs g = gradient_of(name, [&](const auto& in) {
        using T = typename std::decay_t<decltype(in[0])>::value_type;
        std::vector<T> y, h;
        reference(in, s, y, h);
        T sum = 0.0;
        for (size_t i = 0; i < h.size(); i++) sum += h[i] * T((double)dh[i]);
        for (size_t i = 0; i < dy.size(); i++) sum += y[i] * T((double)dy[i]);
        return sum;
    }, x);

    const int block = s.d > 2048 ? 512 : 256;
    in_all_orders(name, [&] {
        Array<float> y(s.merges ? n : 0), inv(s.rows), h32(n);
        Array<bf16_t> h(n);
        launch((std::string("residual_norm_fwd_") + s.suffix).c_str(), {s.rows}, block,
               {branch, stream, s1, b1, s2, b2, w, y, h, inv, s.d, (float)EPS});
        launch((std::string("residual_norm_fwd_f32_") + s.suffix).c_str(), {s.rows}, block,
               {branch, stream, s1, b1, s2, b2, w, y, h32, inv, s.d, (float)EPS});
        if (s.merges) expect_close(name + " y", y, want_y, F32);
        expect_close(name + " h", h, want_h, BF16);
        expect_close(name + " h f32", h32, want_h, F32);

        const int per_block = 16, blocks = (s.rows + per_block - 1) / per_block;
        Array<bf16_t> d_branch(s.merges ? n : 0);
        Array<float> d_stream(n), partial((size_t)blocks * 4 * s.d);
        launch((std::string("residual_norm_bwd_") + s.suffix).c_str(), {blocks}, block,
               {branch, stream, s1, b1, s2, b2, w, inv, dh, dy, d_branch, d_stream, partial, s.rows, s.d, per_block});
        // Gradients of parameters are added to what is there.
        const double there = 0.5;
        auto grad = [&](bool wanted) { return Array<float>(std::vector<float>(wanted ? s.d : 0, (float)there)); };
        Array<float> dw = grad(true), ds1 = grad(s.merges), db1 = grad(s.merges), ds2 = grad(s.merges), db2 = grad(s.merges);
        launch("residual_norm_params", {(s.d + 255) / 256}, 256, {partial, s1, s2, dw, ds1, db1, ds2, db2, blocks, s.d});
        if (s.merges) expect_close(name + " d_branch", d_branch, g[0], BF16);
        expect_close(name + " d_stream", d_stream, g[1], F32);
        auto plus = [&](std::vector<double> v) {
            for (double& x : v) x += there;
            return v;
        };
        const std::vector<double> sums[] = {numbers(ds1), numbers(db1), numbers(ds2), numbers(db2), numbers(dw)};
        for (int i = s.merges ? 0 : 4; i < 5; i++)
            expect_close(name + " parameter " + std::to_string(i), sums[i], plus(g[2 + i]), 4 * F32);
        return std::vector<std::vector<double>>{numbers(y), numbers(h), numbers(d_stream), sums[4], sums[0]};
    });
}

}  // namespace

ZK_TEST(residual_norm) {
    one({1, 1, "512", true, true});
    one({65, 63, "512", true, true});
    one({17, 512, "512", true, false});
    one({3, 1025, "2048", true, true});
    one({2, 2049, "4096", true, true});
    one({5, 130, "512", false, true});
}
