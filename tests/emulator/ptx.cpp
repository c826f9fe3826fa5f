// Instructions that are the same in all kernels, compiled once.
#include "ptx_sm90.cuh"

template <>
float16 narrow(float x) {
    const uint32_t sign = __float_as_uint(x) >> 31 << 15;
    const float magnitude = std::fabs(x);
    if (x != x) return {0x7fff};
    if (magnitude >= 65520.f) return {static_cast<unsigned short>(sign | 0x7c00)};
    // In units of the last place: of subnormal numbers' at least.
    const int exponent = std::max(magnitude == 0.f ? -24 : std::ilogb(magnitude) - 10, -24);
    const uint32_t units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, -exponent)));
    return {static_cast<unsigned short>(sign | (static_cast<uint32_t>(exponent + 24) * 1024 + units))};
}

// --- fragments in shared memory ---

void ldmatrix_x4(uint32_t (&r)[4], uint32_t row) {
    emulator::shared(row, 16);
    emulator::meet<1>({row}, [&](auto& rows, int lane) {
        for (int i = 0; i < 4; ++i) std::memcpy(&r[i], shared_memory + rows[8 * i + lane / 4][0] + lane % 4 * 4, 4);
        return 0;
    });
}
void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row) {
    emulator::shared(row, 16);
    emulator::meet<1>({row}, [&](auto& rows, int lane) {
        for (int i = 0; i < 4; ++i) {
            unsigned short pair[2];
            for (int e = 0; e < 2; ++e)
                std::memcpy(&pair[e], shared_memory + rows[8 * i + lane % 4 * 2 + e][0] + lane / 4 * 2, 2);
            std::memcpy(&r[i], pair, 4);
        }
        return 0;
    });
}
void stmatrix_x4(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    emulator::shared(row, 16);
    const uint32_t r[4] = {a, b, c, d};
    emulator::meet<1>({row}, [&](auto& rows, int lane) {
        for (int i = 0; i < 4; ++i) std::memcpy(shared_memory + rows[8 * i + lane / 4][0] + lane % 4 * 4, &r[i], 4);
        return 0;
    });
}

// --- TMA ---

// Calls f(place in shared memory, place in the tensor or null) for each element of a box.
template <class F>
void each_of_box(const TensorMap& map, uint32_t tile, const int (&corner)[5], F f) {
    int64_t count = 1;
    for (int64_t n : map.box) count *= n;
    for (int64_t i = 0; i < count; ++i) {
        int64_t rest = i, offset = 0;
        bool inside = true;
        for (int axis = 0; axis < 5; ++axis) {
            const int64_t at = corner[axis] + rest % map.box[axis];
            inside &= at >= 0 && at < map.sizes[axis];
            offset += at * (axis ? map.strides[axis - 1] : 2);
            rest /= map.box[axis];
        }
        f(emulator::shared(swizzled(tile + 2 * i, map.swizzle_bytes), 2), inside ? map.address + offset : nullptr);
    }
}
void tma_load(uint32_t tile, const TensorMap& map, uint32_t bar, int c0, int c1, int c2, int c3, int c4,
              unsigned long long) {
    auto starts = [](unsigned char* to, const unsigned char*) { emulator::mark(smem_address(to), 2, emulator::STARTS); };
    if (WATCHES) each_of_box(map, tile, {c0, c1, c2, c3, c4}, starts), emulator::release(64 + bar);
    auto load = [=, &map] {
        int bytes = 0;
        each_of_box(map, tile, {c0, c1, c2, c3, c4}, [&](unsigned char* to, const unsigned char* from) UNSEEN {
            bytes += 2;
            if (WATCHES) emulator::mark(smem_address(to), 2, emulator::LANDS_BY_ITSELF);
            if (from)
                std::memcpy(to, from, 2);
            else
                std::memset(to, 0, 2);
        });
        mbarrier(bar).bytes -= bytes;
        mbarrier(bar).settle();
    };
    if (emulator::is_in_a_hurry())
        load(), ++emulator::events;
    else
        emulator::block->in_flight.push_back(load);
}
void tma_store(const TensorMap& map, uint32_t tile, int c0, int c1, int c2, int c3, int c4) {
    emulator::thread->stores.push_back([=, &map] {
        each_of_box(map, tile, {c0, c1, c2, c3, c4}, [](const unsigned char* from, unsigned char* to) {
            if (to) std::memcpy(to, from, 2);
        });
    });
}
