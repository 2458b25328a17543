// Functions of ggml's libraries, which are loaded, but not linked with the stand-in.
#pragma once
#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace standin {

// The path of a loaded library, such as "libggml-cpu": libggml-cpu.so.0, or libggml-cpu-haswell.so of a build with a
// CPU backend for each kind of processor.
inline std::string path_of(const char * library) {
    struct Search {
        const char * library;
        std::string  path;
    } search{library, ""};
    dl_iterate_phdr(
        [](dl_phdr_info * info, size_t, void * data) {
            auto &       wanted = *static_cast<Search *>(data);
            const char * slash  = std::strrchr(info->dlpi_name, '/');
            const size_t n      = std::strlen(wanted.library);
            if (!slash || std::strncmp(slash + 1, wanted.library, n) != 0 || !std::strchr(".-", slash[1 + n])) {
                return 0;
            }
            wanted.path = info->dlpi_name;
            return 1;
        },
        &search);
    return search.path;
}

template <typename F> F find(const char * library, const char * name) {
    void * handle = dlopen(path_of(library).c_str(), RTLD_NOLOAD | RTLD_NOW);
    void * found  = handle ? dlsym(handle, name) : nullptr;
    if (!found) {
        std::fprintf(stderr, "stand-in: no %s in %s\n", name, library);
        std::abort();
    }
    return reinterpret_cast<F>(found);
}

}  // namespace standin

#define BASE(name) standin::find<decltype(&name)>("libggml-base", #name)
#define CPU(name) standin::find<decltype(&name)>("libggml-cpu", #name)
