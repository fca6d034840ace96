// elementwise.zk.cpp and embedding.zk.cpp against plain loops.
#include <algorithm>

#include "check.h"

namespace {

int blocks(long n, int block = 256) { return (int)((n + block - 1) / block); }

void embedding(int tokens, int d, int vocab, int pad) {
    const std::string name = "embedding of " + std::to_string(tokens);
    Random random(tokens);
    Array<int> ids(tokens);
    // A few ids are frequent.
    for (int& id : ids.v) id = random.below(3) ? random.below(4) : random.below(vocab);
    Array<float> table = random.f32((size_t)vocab * d), dy = random.f32((size_t)tokens * d), start = random.f32((size_t)vocab * d);
    // The order of the additions is part of the promise, so this is f32 and exact.
    std::vector<float> want = start.v;
    for (int t = 0; t < tokens; t++)
        for (int c = 0; c < d && ids[t] != pad; c++) want[ids[t] * d + c] += dy[t * d + c];
    in_all_orders(name, [&] {
        Array<float> y((size_t)tokens * d), d_table = start;
        launch("embedding_fwd", {tokens}, 256, {ids, table, y, d});
        for (int t = 0; t < tokens; t++)
            expect(std::equal(&y[t * d], &y[t * d] + d, &table[ids[t] * d]), name + " row");
        int padded = 1;
        while (padded < tokens) padded *= 2;
        Array<unsigned long long> keys(padded);
        launch("embedding_keys", {blocks(padded)}, 256, {ids, keys, tokens, padded, pad});
        const int in_block = std::min(padded, 1024);
        launch("embedding_sort_block", {padded / in_block}, 256, {keys, padded, 2, in_block});
        for (int size = 2 * in_block; size <= padded; size *= 2) {
            for (int distance = size / 2; distance >= 1024; distance /= 2)
                launch("embedding_sort_step", {blocks(padded / 2)}, 256, {keys, padded, size, distance});
            launch("embedding_sort_block", {padded / 1024}, 256, {keys, padded, size, size});
        }
        expect(std::is_sorted(keys.v.begin(), keys.v.end()), name + " sorted");
        launch("embedding_bwd", {tokens, blocks(d)}, 256, {keys, dy, d_table, tokens, d});
        expect(d_table.v == want, name + " gradient");
        return std::vector<std::vector<double>>{numbers(d_table)};
    });
}

void affine(int rows, int d) {
    Random random(rows);
    const std::string name = "affine of " + std::to_string(rows);
    Array<float> x = random.f32(rows * d), scale = random.f32(d), bias = random.f32(d), dy = random.f32(rows * d);
    const Inputs in = {numbers(x), numbers(scale), numbers(bias)};
    std::vector<double> want;
    for (int i = 0; i < rows * d; i++) want.push_back(((double)x[i] + bias[i % d]) * scale[i % d]);
    const Inputs g = gradient_of(name, [&](const auto& v) {
        using N = typename std::decay_t<decltype(v[0])>::value_type;
        N sum = 0.0;
        for (int i = 0; i < rows * d; i++) sum += (v[0][i] + v[2][i % d]) * v[1][i % d] * N((double)dy[i]);
        return sum;
    }, in);
    in_all_orders(name, [&] {
        const int per_block = 8, row_blocks = blocks(rows, per_block);
        Array<float> y(rows * d), dx(rows * d), partial(row_blocks * 2 * d), d_scale(std::vector<float>(d, 0.0f)),
            d_bias(std::vector<float>(d, 0.0f));
        launch("affine_fwd", {blocks(rows * d)}, 256, {x, scale, bias, y, (long)rows * d, d});
        launch("affine_bwd", {blocks(d), row_blocks}, 256, {x, scale, bias, dy, dx, partial, rows, d, per_block});
        launch("affine_params", {blocks(d)}, 256, {partial, scale, d_scale, d_bias, row_blocks, d});
        expect_close(name, y, want, F32);
        expect_close(name + " dx", dx, g[0], F32);
        expect_close(name + " d_scale", d_scale, g[1], F32);
        expect_close(name + " d_bias", d_bias, g[2], F32);
        return std::vector<std::vector<double>>{numbers(d_scale)};
    });
}

void flat(int count) {
    Random random(count);
    const std::string name = "flat of " + std::to_string(count);
    Array<float> a = random.f32(count), b = random.f32(count);
    Array<bf16_t> h = random.bf16(count), cast(count);
    Array<float> sum = a, sum_h = a, wide(count), filled(count);
    launch("add_assign", {blocks(count)}, 256, {sum, b, (long)count});
    launch("add_assign_bf16", {blocks(count)}, 256, {sum_h, h, (long)count});
    launch("cast_f32_bf16", {blocks(count)}, 256, {a, cast, (long)count});
    launch("cast_bf16_f32", {blocks(count)}, 256, {h, wide, (long)count});
    launch("fill", {blocks(count)}, 256, {filled, 2.5f, (long)count});
    double squares = 0.0;
    for (int i = 0; i < count; i++) {
        expect(sum[i] == a[i] + b[i] && sum_h[i] == a[i] + from_bf16(h[i]) && cast[i] == to_bf16(a[i]) && wide[i] == from_bf16(h[i]) &&
                   filled[i] == 2.5f, name);
        squares += (double)a[i] * a[i];
    }
    in_all_orders(name, [&] {
        Array<double> partial(blocks(count, 100)), total(1);
        launch("sum_of_squares", {blocks(count, 100)}, 256, {a, partial, (long)count, 100});
        launch("sum_f64", {}, 256, {partial, total, blocks(count, 100)});
        expect(std::fabs(total[0] - squares) <= 1e-12 * squares, name + " sum of squares");
        return std::vector<std::vector<double>>{numbers(total)};
    });
}

void rows() {
    Random random(5);
    const int tokens = 9, d = 7;
    Array<unsigned char> valid(tokens);
    for (int t = 0; t < tokens; t++) valid[t] = t % 3 != 1;
    Array<float> x = random.f32(tokens * d);
    Array<bf16_t> h = random.bf16(tokens * d);
    Array<float> masked = x;
    Array<bf16_t> masked_h = h;
    launch("mask_rows", {blocks(tokens * d)}, 256, {masked, valid, (long)tokens * d, d});
    launch("mask_rows_bf16", {blocks(tokens * d)}, 256, {masked_h, valid, (long)tokens * d, d});
    for (int i = 0; i < tokens * d; i++)
        expect(masked[i] == (valid[i / d] ? x[i] : 0.0f) && masked_h[i] == (valid[i / d] ? h[i] : 0), "mask_rows");
    // The last 2 of each 3 rows: of three sequences.
    Array<float> last(3 * 2 * d);
    std::vector<float> want;
    for (int i = 0; i < tokens * d; i++)
        if (i / d % 3) want.push_back(x[i]);
    Array<float> from(std::vector<float>(x.v.begin() + d, x.v.end()));
    launch("copy_runs", {blocks(3 * 2 * d)}, 256, {from, last, (long)3 * 2 * d, d, 2, (long)3 * d, (long)2 * d});
    expect(last.v == want, "copy_runs");
}

}  // namespace

ZK_TEST(embedding) {
    embedding(1, 1, 5, -1);
    embedding(65, 300, 50, 2);
    embedding(2500, 3, 200, -1);
}

ZK_TEST(elementwise) {
    affine(1, 1);
    affine(65, 300);
    flat(1);
    flat(1025);
    rows();
}
