// How fa3_wgmma.cu orders its work: what changes how long a kernel takes to run or to compile, and
// not what it computes. cufa/specs/fa3_wgmma.py names a schedule for each variant. Figures are
// those of an H200.
#pragma once

// Fastest to run.
struct Plain {
    // Whether keys that need row maxima, a tile's first ones and those of a block's first tile
    // share a step, where Q has several slots.
    static constexpr bool FOLDED = false;
    // Whether a tile's first K is asked for in front of its Q, where Q has one slot, which is free
    // later.
    static constexpr bool K_FIRST = true;
    // How many columns of O leave registers to hold m twice, and for a loop of keys that need row
    // maxima and one of the others. Two loops take long to compile where O is wider. In one loop, O
    // is waited for after the exponentials, which then run under the one consumer's own O, if there
    // is but one on the multiprocessor.
    static constexpr int NARROW = 128;
    // How many consumers keep the tensor cores busy while one waits: O is then waited for in front
    // of the softmax.
    static constexpr int BUSY_CONSUMERS = 3;
    // Terms of the curves whose P is packed in either branch, where it comes out of the curve or of
    // its substitute: ptxas does not mix what follows a branch with the exponentials, which leave
    // room for that if O has been waited for. Float16's curve has more, and takes more registers.
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
