// Functions of ggml's libraries, which are loaded, but not linked with the stand-in.
#pragma once
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

namespace standin {

template <typename F> F find(const char * library, const char * name) {
    void * handle = dlopen(library, RTLD_NOLOAD | RTLD_NOW);
    void * found  = handle ? dlsym(handle, name) : nullptr;
    if (!found) {
        std::fprintf(stderr, "stand-in: no %s in %s\n", name, library);
        std::abort();
    }
    return reinterpret_cast<F>(found);
}

}  // namespace standin

#define BASE(name) standin::find<decltype(&name)>("libggml-base.so.0", #name)
#define CPU(name) standin::find<decltype(&name)>("libggml-cpu.so.0", #name)
