// A library in place of NVIDIA's libnvidia-ml.so.1, for machines without its driver: the sensors of the stand-in's cards.
// https://docs.nvidia.com/deploy/nvml-api/ describes the calls. It tells what STANDIN_NVML says, and measures nothing:
// a list of NAME=NUMBER with watts, limit, core and memory (MHz), and fail, the error of every reading.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { NOT_SUPPORTED = 3, NOT_FOUND = 6 };

// The number that STANDIN_NVML gives to a name. It is read anew at each call, so that a test can change it.
static double number(const char * name, double otherwise) {
    const char * all = getenv("STANDIN_NVML");
    size_t length = strlen(name);
    for (const char * at = all; at && *at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        if (!strncmp(at, name, length) && at[length] == '=') { return atof(at + length + 1); }
    }
    return otherwise;
}

static int failure(void) { return (int) number("fail", 0); }

int nvmlInitWithFlags(unsigned flags) { (void) flags; return (int) number("init", 0); }

const char * nvmlErrorString(int error) {
    switch (error) {
        case NOT_SUPPORTED: return "Not Supported";
        case NOT_FOUND: return "Not Found";
        case 15: return "GPU is lost";
        default: return "an error of the stand-in";
    }
}

// The stand-in's card N, from 0 on, is at 0000:(N + 1):00.0.
int nvmlDeviceGetHandleByPciBusId_v2(const char * address, void ** card) {
    const char * devices = getenv("STANDIN_DEVICES");
    unsigned bus, n = devices ? (unsigned) atoi(devices) : 1;
    if (sscanf(address, "%*x:%x:00.0", &bus) != 1 || bus < 1 || bus > n) { return NOT_FOUND; }
    *card = (void *) (uintptr_t) bus;
    return 0;
}

int nvmlDeviceGetPowerUsage(void * card, unsigned * milliwatts) {
    (void) card;
    *milliwatts = (unsigned) (1e3 * number("watts", 60));
    return failure();
}

int nvmlDeviceGetEnforcedPowerLimit(void * card, unsigned * milliwatts) {
    (void) card;
    *milliwatts = (unsigned) (1e3 * number("limit", 200));
    return 0;
}

// A card that takes `joules` watts, which it tells by its counter alone. Without that number it has no counter.
int nvmlDeviceGetTotalEnergyConsumption(void * card, uint64_t * millijoules) {
    struct timespec now;
    double watts = number("joules", -1);
    (void) card;
    if (watts < 0) { return NOT_SUPPORTED; }
    clock_gettime(CLOCK_MONOTONIC, &now);
    *millijoules = (uint64_t) (1e3 * watts * (now.tv_sec + 1e-9 * now.tv_nsec));
    return failure();
}

int nvmlDeviceGetClockInfo(void * card, int kind, unsigned * mhz) {
    double found = number(kind == 2 ? "memory" : "core", kind == 2 ? 5001 : 1410);
    (void) card;
    if (found <= 0) { return NOT_SUPPORTED; }
    *mhz = (unsigned) found;
    return failure();
}
