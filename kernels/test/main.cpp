// Runs the kernels' tests.   zk-test [--hip LIBRARY --kernels FOLDER [--arch gfx942]] [name ...]
//
// On fibers, or, with --hip, on whatever stands behind a HIP library: a GPU, or a program that takes its place.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

#include "check.h"

static std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

void add_test(Test test) { tests().push_back(test); }

int main(int argc, char** argv) {
    const char *library = nullptr, *folder = nullptr, *arch = "gfx942";
    std::vector<std::string> wanted;
    for (int i = 1; i < argc; i++) {
        const bool has_value = i + 1 < argc;
        if (!strcmp(argv[i], "--hip") && has_value) library = argv[++i];
        else if (!strcmp(argv[i], "--kernels") && has_value) folder = argv[++i];
        else if (!strcmp(argv[i], "--arch") && has_value) arch = argv[++i];
        else wanted.push_back(argv[i]);
    }
    if (library) {
        if (!folder) {
            fprintf(stderr, "error: --hip needs --kernels, the folder with the code objects\n");
            return 2;
        }
        use_hip(library, folder, arch);
    }
    std::sort(tests().begin(), tests().end(), [](const Test& a, const Test& b) { return strcmp(a.name, b.name) < 0; });
    bool known = true;
    for (const std::string& name : wanted) {
        const bool found = std::any_of(tests().begin(), tests().end(), [&](const Test& t) { return name == t.name; });
        if (!found) fprintf(stderr, "error: no test %s\n", name.c_str());
        known &= found;
    }
    if (!known) return 2;
    for (const Test& test : tests()) {
        bool run = wanted.empty() && !(library && test.fibers_only);
        for (const std::string& name : wanted) run |= name == test.name;
        if (!run) continue;
        const int before = failures();
        const clock_t start = clock();
        test.run();
        printf("%-20s %s  %.1f s\n", test.name, failures() == before ? "ok" : "FAILED", (double)(clock() - start) / CLOCKS_PER_SEC);
        fflush(stdout);
    }
    return failures() > 0;
}
