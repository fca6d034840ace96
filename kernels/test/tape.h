// Derivatives of the references: a number that remembers how it was computed, and the walk back. References are templates over
// their number type; with double they compute the function, with Var its gradient too.
#pragma once
#include <cmath>
#include <vector>

struct Tape {
    struct Node {
        int parent[2];
        double slope[2];
    };
    std::vector<Node> nodes;
    static Tape& the() {
        static Tape t;
        return t;
    }
    int add(int a, double da, int b, double db) {
        nodes.push_back({{a, b}, {da, db}});
        return (int)nodes.size() - 1;
    }
};

struct Var {
    double x;
    /// Place in the tape; -1 = a constant.
    int id;
    Var(double v = 0.0) : x(v), id(-1) {}
    Var(double v, int i) : x(v), id(i) {}
    static Var input(double v) { return {v, Tape::the().add(-1, 0, -1, 0)}; }
};

inline Var node(double x, const Var& a, double da, const Var& b = Var(), double db = 0.0) {
    if (a.id < 0 && b.id < 0) return Var(x);
    return {x, Tape::the().add(a.id, da, b.id, db)};
}
inline Var operator+(const Var& a, const Var& b) { return node(a.x + b.x, a, 1, b, 1); }
inline Var operator-(const Var& a, const Var& b) { return node(a.x - b.x, a, 1, b, -1); }
inline Var operator-(const Var& a) { return node(-a.x, a, -1); }
inline Var operator*(const Var& a, const Var& b) { return node(a.x * b.x, a, b.x, b, a.x); }
inline Var operator/(const Var& a, const Var& b) { return node(a.x / b.x, a, 1 / b.x, b, -a.x / (b.x * b.x)); }
inline Var& operator+=(Var& a, const Var& b) { return a = a + b; }
inline Var exp(const Var& a) {
    const double e = std::exp(a.x);
    return node(e, a, e);
}
inline Var sqrt(const Var& a) {
    const double s = std::sqrt(a.x);
    return node(s, a, 0.5 / s);
}
inline Var erf(const Var& a) { return node(std::erf(a.x), a, 2 / std::sqrt(M_PI) * std::exp(-a.x * a.x)); }

inline double value(double x) { return x; }
inline double value(const Var& x) { return x.x; }
using std::erf;
using std::exp;
using std::sqrt;

/// Rounds to bf16 as a product's operand is; the derivative passes through. Off while derivatives are checked by differences.
struct Rounding {
    bool on = true, used = false;
    static Rounding& the() {
        static Rounding r;
        return r;
    }
};
double nearest_bf16(double x);
inline double through_bf16(double x) {
    Rounding::the().used = true;
    return Rounding::the().on ? nearest_bf16(x) : x;
}
inline Var through_bf16(const Var& a) { return node(through_bf16(a.x), a, 1); }

/// Gradients of `of` with respect to all numbers of the tape.
inline std::vector<double> gradients(const Var& of) {
    const std::vector<Tape::Node>& nodes = Tape::the().nodes;
    std::vector<double> g(nodes.size(), 0.0);
    if (of.id >= 0) g[of.id] = 1.0;
    for (int i = (int)nodes.size() - 1; i >= 0; i--)
        for (int p = 0; p < 2; p++)
            if (nodes[i].parent[p] >= 0) g[nodes[i].parent[p]] += g[i] * nodes[i].slope[p];
    return g;
}
