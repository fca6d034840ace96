#include <dirent.h>
#include <dlfcn.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <string>

#include "../cpu/runtime.h"
#include "array.h"

float from_bf16(bf16_t h) {
    const unsigned u = (unsigned)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

bf16_t to_bf16(float f) {
    unsigned u;
    memcpy(&u, &f, 4);
    return (bf16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

std::vector<double> numbers(const Array<float>& a) { return {a.v.begin(), a.v.end()}; }
std::vector<double> numbers(const Array<double>& a) { return a.v; }
std::vector<double> numbers(const Array<bf16_t>& a) {
    std::vector<double> out;
    for (bf16_t h : a.v) out.push_back(from_bf16(h));
    return out;
}

Array<float> Random::f32(size_t n, double sigma, double mean) {
    Array<float> a(n);
    for (float& x : a.v) x = (float)(mean + normal(sigma));
    return a;
}

Array<bf16_t> Random::bf16(size_t n, double sigma, double mean) {
    Array<bf16_t> a(n);
    for (bf16_t& x : a.v) x = to_bf16((float)(mean + normal(sigma)));
    return a;
}

namespace {

[[noreturn]] void die(const std::string& message) {
    fprintf(stderr, "error: %s\n", message.c_str());
    exit(1);
}

/// The few calls of the HIP runtime that are needed, opened by name.
struct Hip {
    int (*malloc)(void**, size_t);
    int (*free)(void*);
    int (*memcpy)(void*, const void*, size_t, int);
    int (*module_load_data)(void**, const void*);
    int (*get_function)(void**, void*, const char*);
    int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
    int (*synchronize)();
    std::vector<void*> modules;
    std::map<std::string, void*> functions;
};
Hip* hip = nullptr;

void check(int status, const char* what) {
    if (status != 0) die(std::string(what) + " gives HIP error " + std::to_string(status));
}

void* function(const char* kernel) {
    void*& f = hip->functions[kernel];
    for (size_t i = 0; !f && i < hip->modules.size(); i++)
        if (hip->get_function(&f, hip->modules[i], kernel) != 0) f = nullptr;
    if (!f) die(std::string("no code object has kernel ") + kernel);
    return f;
}

void launch_hip(const char* kernel, Grid grid, int block, std::vector<Arg>& args) {
    std::map<void*, void*> copies;
    std::vector<void*> pointers(args.size());
    std::vector<void*> params;
    for (size_t i = 0; i < args.size(); i++) {
        Arg& a = args[i];
        if (a.is_array && a.array) {
            void*& on_device = copies[a.array];
            if (!on_device) {
                check(hip->malloc(&on_device, a.bytes), "hipMalloc");
                check(hip->memcpy(on_device, a.array, a.bytes, 1), "hipMemcpy");
            }
            pointers[i] = on_device;
        }
        params.push_back(a.is_array ? (void*)&pointers[i] : (void*)a.number);
    }
    check(hip->launch(function(kernel), grid.x, grid.y, grid.z, block, 1, 1, 0, nullptr, params.data(), nullptr), kernel);
    check(hip->synchronize(), kernel);
    for (Arg& a : args) {
        if (!a.is_array || !a.array || !copies.count(a.array)) continue;
        check(hip->memcpy(a.array, copies[a.array], a.bytes, 2), "hipMemcpy");
        check(hip->free(copies[a.array]), "hipFree");
        copies.erase(a.array);
    }
}

void launch_fibers(const char* kernel, Grid grid, int block, std::vector<Arg>& args) {
    std::vector<void*> params;
    zk_cpu_allow_none();
    for (Arg& a : args) {
        if (a.is_array && a.array) zk_cpu_allow(a.array, a.bytes);
        params.push_back(a.is_array ? (void*)&a.array : (void*)a.number);
    }
    const zk_cpu_kernel* k = zk_cpu_find(kernel);
    if (!k) die(std::string("no kernel ") + kernel);
    if (k->num_params != (int)args.size())
        die(std::string(kernel) + " takes " + std::to_string(k->num_params) + " arguments, not " + std::to_string(args.size()));
    if (zk_cpu_launch(kernel, grid.x, grid.y, grid.z, block, params.data())) die(zk_cpu_error());
}

}  // namespace

void launch(const char* kernel, Grid grid, int block, std::vector<Arg> args) {
    for (Arg& a : args)
        if (a.is_array && a.bytes == 0) a.array = nullptr;
    hip ? launch_hip(kernel, grid, block, args) : launch_fibers(kernel, grid, block, args);
}

void use_hip(const char* library, const char* folder, const char* arch) {
    void* lib = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!lib) die(dlerror());
    auto find = [&](const char* name) {
        void* f = dlsym(lib, name);
        if (!f) die(std::string(library) + " has no " + name);
        return f;
    };
    hip = new Hip;
    hip->malloc = (decltype(hip->malloc))find("hipMalloc");
    hip->free = (decltype(hip->free))find("hipFree");
    hip->memcpy = (decltype(hip->memcpy))find("hipMemcpy");
    hip->module_load_data = (decltype(hip->module_load_data))find("hipModuleLoadData");
    hip->get_function = (decltype(hip->get_function))find("hipModuleGetFunction");
    hip->launch = (decltype(hip->launch))find("hipModuleLaunchKernel");
    hip->synchronize = (decltype(hip->synchronize))find("hipDeviceSynchronize");
    const std::string end = std::string(".") + arch + ".co";
    DIR* d = opendir(folder);
    if (!d) die(std::string("cannot read ") + folder);
    while (dirent* entry = readdir(d)) {
        const std::string name = entry->d_name;
        if (name.size() <= end.size() || name.compare(name.size() - end.size(), end.size(), end) != 0) continue;
        void* module = nullptr;
        std::ifstream file(std::string(folder) + "/" + name, std::ios::binary);
        // Kept: the library may go on reading it.
        auto* image = new std::string(std::istreambuf_iterator<char>(file), {});
        check(hip->module_load_data(&module, image->data()), name.c_str());
        hip->modules.push_back(module);
    }
    closedir(d);
}
