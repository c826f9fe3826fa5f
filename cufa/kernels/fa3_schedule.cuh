// How fa3_wgmma.cu orders its work: what changes how long a kernel takes to run or to compile, and
// not what it computes. cufa/specs/fa3_wgmma.py names a schedule for each variant. Figures are
// those of an H200.
#pragma once

// Fastest to run.
struct Plain {
    // Whether one step serves key tiles that need row maxima, a row tile's first key tile, and the
    // block's first. Only where Q has several slots.
    static constexpr bool FOLDED = false;
    // Whether a tile's first K is asked for in front of its Q, where Q has one slot, which is free
    // later.
    static constexpr bool K_FIRST = true;
    // Up to how many columns of O there are registers to hold m twice, and for two loops: one of
    // key tiles that need row maxima, one of the others. Wider O takes one loop, since two compile
    // slowly. It waits for O after the exponentials, so that a lone consumer's exponentials run
    // under its own O.
    static constexpr int NARROW = 128;
    // How many consumers keep the tensor cores busy while one waits: O is then waited for in front
    // of the softmax.
    static constexpr int BUSY_CONSUMERS = 3;
    // Curves of up to SHORT_CURVE terms pack P within each branch, of the curve or of its
    // substitute, because ptxas does not mix instructions behind a branch with the exponentials in
    // it. That needs the registers which waiting for O has freed. Float16's curve has more terms.
    static constexpr int SHORT_CURVE = 3;
};

// For scores that take long to compile, and for tiles in which Q cannot wait.
struct General : Plain {
    // Two thirds of the time to compile, and up to 1.02 of it to run.
    static constexpr bool FOLDED = true;
    // Consumers that free some of the tile before when they take up its Q would wait for ever. With
    // the widest rows and a mask they wait for Q longer, and three consumers would spill more.
    static constexpr bool K_FIRST = false;
};
