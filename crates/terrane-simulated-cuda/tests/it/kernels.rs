//! Kernels, interpreted.

use terrane_simulated_cuda::exports::*;

use crate::support::*;

/// `to[i] = from[i] + 1` for a length of words, by a stride over the grid.
const ADD: &std::ffi::CStr = c"
.version 7.0
.target sm_70
.address_size 64
.visible .entry add_one(
    .param .u64 add_one_param_0, .param .u64 add_one_param_1, .param .u32 add_one_param_2
)
{
    .reg .pred %p<3>;
    .reg .b32 %r<12>;
    .reg .b64 %rd<10>;
    ld.param.u64 %rd1, [add_one_param_0];
    ld.param.u64 %rd2, [add_one_param_1];
    ld.param.u32 %r1, [add_one_param_2];
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    mov.u32 %r6, %nctaid.x;
    mul.lo.s32 %r7, %r6, %r2;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra $L__end;
$L__loop:
    mul.wide.u32 %rd5, %r5, 4;
    add.s64 %rd6, %rd4, %rd5;
    ld.global.u32 %r8, [%rd6];
    add.s32 %r9, %r8, 1;
    add.s64 %rd7, %rd3, %rd5;
    st.global.u32 [%rd7], %r9;
    add.s32 %r5, %r5, %r7;
    setp.lt.u32 %p2, %r5, %r1;
    @%p2 bra $L__loop;
$L__end:
    ret;
}
// Each block reverses its 64 bytes through shared memory.
.visible .entry turn_round(.param .u64 memory)
{
    .shared .align 4 .b8 held[64];
    ld.param.u64 %rd1, [memory];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    shl.b32 %r3, %r2, 6;
    add.u32 %r4, %r3, %r1;
    cvt.u64.u32 %rd2, %r4;
    add.u64 %rd3, %rd1, %rd2;
    ld.global.u8 %rs1, [%rd3];
    mov.u32 %r5, held;
    add.u32 %r6, %r5, %r1;
    st.shared.u8 [%r6], %rs1;
    bar.sync 0;
    sub.u32 %r7, 63, %r1;
    add.u32 %r8, %r5, %r7;
    ld.shared.u8 %rs2, [%r8];
    st.global.u8 [%rd3], %rs2;
    exit;
}
// Each thread adds its number to two sums, of the device and of its block.
.visible .entry combine(.param .u64 sums)
{
    .shared .align 8 .b8 held[8];
    ld.param.u64 %rd1, [sums];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mad.lo.u32 %r4, %r2, %r3, %r1;
    cvt.u64.u32 %rd3, %r4;
    shl.b64 %rd4, %rd3, 40;
    or.b64 %rd5, %rd3, %rd4;
    red.global.xor.b64 [%rd2], %rd5;
    mov.u32 %r5, held;
    atom.shared.add.u64 %rd6, [%r5], %rd3;
    bar.warp.sync -1;
    bar.sync 0;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra $L__done;
    ld.shared.u64 %rd7, [%r5];
    atom.global.max.u64 %rd8, [%rd2+8], %rd7;
    red.global.add.u32 [%rd2+16], 1;
$L__done:
    ret;
}
// A third of the threads end at once. The others loop as often as their number says, by two ways
// through the loop, and meet at a barrier.
.visible .entry diverge(.param .u64 sums)
{
    ld.param.u64 %rd1, [sums];
    mov.u32 %r1, %tid.x;
    rem.u32 %r2, %r1, 3;
    setp.eq.u32 %p1, %r2, 0;
    @%p1 exit;
    mov.u32 %r3, 0;
    mov.u32 %r4, 0;
    and.b32 %r5, %r1, 1;
    setp.eq.u32 %p2, %r5, 1;
$L__again:
    @%p2 bra $L__odd;
    add.u32 %r3, %r3, 2;
    bra $L__next;
$L__odd:
    add.u32 %r3, %r3, 1;
$L__next:
    add.u32 %r3, %r3, %r1;
    add.u32 %r4, %r4, 1;
    setp.lt.u32 %p3, %r4, %r1;
    @%p3 bra $L__again;
    bar.sync 0;
    mov.u32 %r6, %ntid.x;
    mov.u32 %r7, %ctaid.x;
    mad.lo.u32 %r8, %r6, %r7, %r1;
    mul.wide.u32 %rd2, %r8, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r3;
    ret;
}
";

fn load(text: &std::ffi::CStr) -> Result<u64, u32> {
    let mut module = 0;
    let text = In::of(text.to_bytes_with_nul()).cast();
    // SAFETY: one handle is written; the text ends with a zero byte.
    match unsafe { cuModuleLoadData(Out::to(&mut module), text) } {
        0 => Ok(module),
        code => Err(code),
    }
}

fn function(module: u64, name: &std::ffi::CStr) -> Result<u64, u32> {
    let mut function = 0;
    let name = In::of(name.to_bytes_with_nul()).cast();
    // SAFETY: one handle is written; the name ends with a zero byte.
    match unsafe { cuModuleGetFunction(Out::to(&mut function), module, name) } {
        0 => Ok(function),
        code => Err(code),
    }
}

fn launch(function: u64, blocks: u32, threads: u32, stream: u64, arguments: &[&[u8]]) -> u32 {
    let arguments: Vec<In<u8>> = arguments.iter().map(|argument| In::of(argument)).collect();
    let (parameters, none) = (In::of(&arguments), In::none());
    // SAFETY: the number and the sizes of the arguments are those of the kernel's parameters.
    unsafe { cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, none) }
}

fn add_one(function: u64, to: u64, from: u64, words: u32, stream: u64) -> u32 {
    let arguments: [&[u8]; 3] = [&to.to_le_bytes(), &from.to_le_bytes(), &words.to_le_bytes()];
    launch(function, 3, 96, stream, &arguments)
}

#[test]
fn a_kernel_executes_its_text() {
    for config in configs() {
        let _cuda = Cuda::new(config);
        let stream = stream(NON_BLOCKING);
        let add = function(load(ADD).unwrap(), c"add_one").unwrap();
        let words = 1000_u32;
        let bytes: Vec<u8> = (0..words).flat_map(u32::to_le_bytes).collect();
        let (from, to) = (allocate(bytes.len()), allocate(bytes.len()));
        write(from, &bytes);
        ok(add_one(add, to, from, words, stream));
        ok(add_one(add, from, to, words, stream));
        ok(synchronize(stream));
        let expected: Vec<u8> = (2..words + 2).flat_map(u32::to_le_bytes).collect();
        assert!(read(from, bytes.len()) == expected);
    }
}

#[test]
fn threads_of_a_block_wait_for_each_other() {
    let _cuda = Cuda::new(small());
    let stream = stream(NON_BLOCKING);
    let turn = function(load(ADD).unwrap(), c"turn_round").unwrap();
    let bytes: Vec<u8> = (0..=255).collect();
    let memory = allocate(256);
    write(memory, &bytes);
    ok(launch(turn, 4, 64, stream, &[&memory.to_le_bytes()]));
    ok(synchronize(stream));
    let expected: Vec<u8> = bytes.chunks(64).flat_map(|part| part.iter().rev().copied()).collect();
    assert_eq!(read(memory, 256), expected);
}

#[test]
fn atomic_operations_combine_the_numbers_of_all_threads() {
    for config in configs() {
        let _cuda = Cuda::new(config);
        let stream = stream(NON_BLOCKING);
        let combine = function(load(ADD).unwrap(), c"combine").unwrap();
        let memory = allocate(24);
        write(memory, &[0; 24]);
        ok(launch(combine, 3, 70, stream, &[&memory.to_le_bytes()]));
        ok(synchronize(stream));
        let all = (0..210_u64).fold(0, |all, thread| all ^ (thread | thread << 40));
        let of_last_block: u64 = (140..210).sum();
        let expected = [all, of_last_block, 3].map(u64::to_le_bytes).concat();
        assert_eq!(read(memory, 24), expected);
    }
    let _cuda = Cuda::new(small());
    let stream = stream(NON_BLOCKING);
    let combine = function(load(ADD).unwrap(), c"combine").unwrap();
    let memory = allocate(64);
    ok(launch(combine, 1, 1, stream, &[&(memory + 4).to_le_bytes()]));
    assert_eq!(synchronize(stream), 716, "misaligned");
}

#[test]
fn threads_of_a_warp_may_take_different_branches() {
    for config in configs() {
        let _cuda = Cuda::new(config);
        let diverge = function(load(ADD).unwrap(), c"diverge").unwrap();
        let (blocks, threads) = (3, 75_u32);
        let sums = allocate(4 * 3 * 75);
        write(sums, &[0; 4 * 3 * 75]);
        let stream = stream(NON_BLOCKING);
        ok(launch(diverge, blocks, threads, stream, &[&sums.to_le_bytes()]));
        ok(synchronize(stream));
        let of_block = |thread: u32| match (thread % 3, thread % 2) {
            (0, _) => 0,
            (_, odd) => thread * (thread + 2 - odd),
        };
        let all = (0..blocks).flat_map(|_| (0..threads).map(of_block));
        let expected: Vec<u8> = all.flat_map(u32::to_le_bytes).collect();
        assert_eq!(read(sums, expected.len()), expected);
    }
}

#[test]
fn an_unsupported_atomic_operation_is_refused() {
    let _cuda = Cuda::new(small());
    let text = c".version 8.0\n.target sm_80\n.visible .entry k(.param .u64 a) {
        ld.param.u64 %rd1, [a];\nred.global.div.u64 [%rd1], 1;\nret;\n}";
    assert_eq!(load(text), Err(218));
}

#[test]
fn a_kernel_with_an_invalid_address_loses_the_context() {
    for (beyond, code) in [(1, ILLEGAL_ADDRESS), (0, 0)] {
        let _cuda = Cuda::new(small());
        let stream = stream(NON_BLOCKING);
        let add = function(load(ADD).unwrap(), c"add_one").unwrap();
        let memory = allocate(400);
        ok(add_one(add, memory, memory, 100 + beyond, stream));
        assert_eq!(synchronize(stream), code);
    }
    let _cuda = Cuda::new(small());
    let stream = stream(NON_BLOCKING);
    let add = function(load(ADD).unwrap(), c"add_one").unwrap();
    let memory = allocate(400);
    ok(add_one(add, memory + 2, memory, 1, stream));
    assert_eq!(synchronize(stream), 716, "misaligned");
}

#[test]
fn a_kernel_accesses_pinned_memory_at_its_alias_and_enabled_peers() {
    let cuda = Cuda::new(small());
    let stream = stream(NON_BLOCKING);
    let add = function(load(ADD).unwrap(), c"add_one").unwrap();
    let owned = vec![1_u32; 4096];
    let start = u64::try_from(owned.as_ptr().expose_provenance()).unwrap().next_multiple_of(4096);
    // SAFETY: the memory outlives the registration.
    ok(unsafe { cuMemHostRegister_v2(start, 4096, 0) });
    let mut alias = 0;
    // SAFETY: one address is written.
    ok(unsafe { cuMemHostGetDevicePointer_v2(Out::to(&mut alias), start, 0) });
    ok(add_one(add, alias, alias, 16, stream));
    ok(synchronize(stream));
    let other = make_current(1);
    let there = allocate(64);
    write(there, &[0; 64]);
    // SAFETY: no pointers.
    ok(unsafe { cuCtxSetCurrent(cuda.context) });
    // SAFETY: no pointers.
    ok(unsafe { cuCtxEnablePeerAccess(other, 0) });
    // SAFETY: no pointers.
    assert_eq!(unsafe { cuCtxEnablePeerAccess(other, 0) }, 704);
    ok(add_one(add, there, there, 16, stream));
    ok(synchronize(stream));
    assert_eq!(read(there, 4), 1_u32.to_le_bytes());
    // SAFETY: no pointers.
    ok(unsafe { cuCtxDisablePeerAccess(other) });
    ok(add_one(add, there, there, 16, stream));
    assert_eq!(synchronize(stream), ILLEGAL_ADDRESS);
    let first = usize::try_from(start).unwrap() - owned.as_ptr().addr();
    assert_eq!(owned[first / 4], 2);
}

#[test]
fn invalid_launches_are_refused() {
    let _cuda = Cuda::new(small());
    assert_eq!(load(c"no PTX at all"), Err(218));
    let module = load(ADD).unwrap();
    assert_eq!(function(module, c"subtract_one"), Err(500));
    let add = function(module, c"add_one").unwrap();
    let stream = stream(NON_BLOCKING);
    let memory = allocate(64).to_le_bytes();
    let arguments: [&[u8]; 3] = [&memory, &memory, &16_u32.to_le_bytes()];
    assert_eq!(launch(add, 0, 32, stream, &arguments), INVALID_VALUE);
    assert_eq!(launch(add, 1, 2048, stream, &arguments), INVALID_VALUE);
    ok(launch(add, 1, 32, stream, &arguments));
    ok(synchronize(stream));
    // SAFETY: no pointers.
    ok(unsafe { cuModuleUnload(module) });
    assert_eq!(launch(add, 1, 32, stream, &arguments), 400, "unloaded");
}
