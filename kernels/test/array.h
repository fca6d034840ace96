// Arrays that kernels get, and launching kernels on whichever device the tests run on.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

typedef unsigned short bf16_t;

float from_bf16(bf16_t h);
bf16_t to_bf16(float f);
/// The nearest bf16 number.
inline float rounded(double x) { return from_bf16(to_bf16((float)x)); }

template <class T>
struct Array {
    std::vector<T> v;
    Array() = default;
    /// Outputs begin as bytes 0xff: NaN, or a large number that no test expects.
    explicit Array(size_t n) : v(n) { memset((void*)v.data(), 0xff, n * sizeof(T)); }
    Array(std::vector<T> from) : v(std::move(from)) {}
    T& operator[](size_t i) { return v[i]; }
    const T& operator[](size_t i) const { return v[i]; }
    size_t size() const { return v.size(); }
    bool empty() const { return v.empty(); }
};

/// As doubles, whatever the storage.
std::vector<double> numbers(const Array<float>& a);
std::vector<double> numbers(const Array<bf16_t>& a);
std::vector<double> numbers(const Array<double>& a);

struct Random {
    std::mt19937 engine;
    explicit Random(unsigned seed) : engine(seed) {}
    double normal(double sigma = 1.0) { return std::normal_distribution<double>(0.0, sigma)(engine); }
    int below(int n) { return (int)(engine() % (unsigned)n); }
    Array<float> f32(size_t n, double sigma = 1.0, double mean = 0.0);
    Array<bf16_t> bf16(size_t n, double sigma = 1.0, double mean = 0.0);
};

/// An argument of a kernel: an array (null if empty), or a number.
struct Arg {
    void* array = nullptr;
    size_t bytes = 0;
    bool is_array = false;
    unsigned char number[8] = {};
    template <class T>
    Arg(Array<T>& a) : array(a.v.data()), bytes(a.size() * sizeof(T)), is_array(true) {}
    Arg(std::nullptr_t) : is_array(true) {}
    Arg(int n) { memcpy(number, &n, 4); }
    Arg(long n) { memcpy(number, &n, 8); }
    Arg(float n) { memcpy(number, &n, 4); }
};

struct Grid {
    int x = 1, y = 1, z = 1;
};

/// Runs a kernel and waits; whatever goes wrong ends the program with a message. An array that appears twice, or is part of
/// another, is one on the device too.
void launch(const char* kernel, Grid grid, int block, std::vector<Arg> args);

/// Opens libamdhip64 or a stand-in, and the code objects in `folder`; tests then run there instead of on fibers.
void use_hip(const char* library, const char* folder, const char* arch);
