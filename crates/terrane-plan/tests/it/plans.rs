//! Tiers, limits, predictions and advice.

use terrane_core::ByteCount;
use terrane_layout::ElementFormat;
use terrane_plan::{
    DiskFacts, DiskSpace, HostFacts, Machine, Model, Plan, PlanError, PlanRequest, TierKind, Trace,
};

fn request(model: &str) -> PlanRequest {
    let mut request = PlanRequest::new(Model::published(model).unwrap());
    request.device = Some(ByteCount::gib(40));
    request.host = Some(ByteCount::gib(256));
    request.disks = vec![DiskSpace { directory: "/cache".into(), bytes: ByteCount::gib(2048) }];
    request
}

#[test]
fn a_tier_holds_as_many_blocks_as_fit() {
    let plan = Plan::new(&request("llama-3.1-8b")).unwrap();
    // A block of 16 tokens is 2 MiB, so there is no padding.
    let blocks: Vec<u64> = plan.tiers.iter().map(|tier| tier.blocks).collect();
    assert_eq!(blocks, [40 * 512, 256 * 512, 2048 * 512]);
    assert!(plan.tiers.iter().all(|tier| tier.used_bytes == tier.given_bytes));
    let host = plan.host.unwrap();
    assert_eq!(host.huge_pages, 131_072);
    assert_eq!(host.sysctl, "sudo sysctl -w vm.nr_hugepages=131072");
    assert_eq!(host.registrations, 4);
}

#[test]
fn padding_has_a_cause() {
    let plan = Plan::new(&request("deepseek_v32-defaults")).unwrap();
    let disk = plan.tiers.iter().find(|tier| tier.kind == TierKind::Disk).unwrap();
    // Latents: a block is 61 · 18,432 = 1,124,352 bytes, which is 274.5 pages. Keys: 128,832 bytes,
    // 31.45 pages.
    assert_eq!(disk.groups[0].block_stride, 275 * 4096);
    assert_eq!(disk.groups[1].block_stride, 32 * 4096);
    let lost = 275 * 4096 - 1_124_352 + 32 * 4096 - 128_832;
    assert_eq!(disk.padding.block_alignment, disk.blocks * lost);
    // Powers of two: 2 MiB and 128 KiB.
    let lost = (2 << 20) - 1_124_352 + (128 << 10) - 128_832;
    assert_eq!(disk.padding.powers_of_two, disk.blocks * lost);
    let host = plan.tiers.iter().find(|tier| tier.kind == TierKind::Host).unwrap();
    assert_eq!(host.padding.block_alignment, 0);
    assert!(host.padding.regions_and_pages < 2 * (2 << 20));
}

#[test]
fn users_need_their_windows_and_their_states() {
    let mut gpt_oss = request("gpt-oss-20b");
    (gpt_oss.context, gpt_oss.users) = (Some(131_072), Some(64));
    let plan = Plan::new(&gpt_oss).unwrap();
    let demand = plan.demand.as_ref().unwrap();
    // Half of the layers keep all tokens. The others keep 128 and the rest of a block. 2 · 8 · 64 ·
    // 2 bytes a layer.
    let layer = 2 * 8 * 64 * 2;
    assert_eq!(demand.bytes_per_user, 12 * layer * (131_072 + 128 + 16));
    assert_eq!(plan.tiers[1].users, Some((256 << 30) / demand.bytes_per_user));
    let windows = plan.savings.iter().find(|saving| saving.change.contains("windows")).unwrap();
    assert!((windows.share() - 0.5).abs() < 0.01, "{windows:?}");

    let mut hybrid = request("qwen3_next-defaults");
    (hybrid.context, hybrid.users) = (Some(4096), Some(8));
    let plan = Plan::new(&hybrid).unwrap();
    assert_eq!(plan.tiers[1].states, 8);
    let state = plan.bytes_per_sequence;
    assert_eq!(plan.demand.unwrap().bytes_per_user, 4096 * plan.bytes_per_token + state);

    // The states of 2,000 users take 73.6 GiB. The device has those of the users that it holds.
    hybrid.users = Some(2000);
    let plan = Plan::new(&hybrid).unwrap();
    let of_one = plan.demand.as_ref().unwrap().bytes_per_user;
    for (tier, given) in plan.tiers.iter().zip([40_u64 << 30, 256 << 30]) {
        assert_eq!(tier.users, Some(given / of_one));
        assert_eq!(tier.states, (given / of_one).min(2000), "{tier:?}");
        assert!(tier.tokens >= (tier.states - 1) * 4096, "{tier:?}");
    }
    // One user does not fit completely. The tier still has one state, and as many blocks as fit.
    hybrid.context = Some(16 << 20);
    let plan = Plan::new(&hybrid).unwrap();
    assert_eq!((plan.tiers[0].users, plan.tiers[0].states), (Some(0), 1));
    assert!(plan.tiers[0].tokens > 1 << 20);

    let mut states = request("mamba2-defaults");
    states.disks.clear();
    let plan = Plan::new(&states).unwrap();
    assert_eq!((plan.tiers[0].blocks, plan.tiers[0].tokens), (0, 0));
    assert!(plan.tiers[0].states > 100);
}

#[test]
fn ranks_share_the_host_and_the_disk() {
    let mut request = request("llama-3.1-70b");
    request.tensor_parallel = 8;
    let plan = Plan::new(&request).unwrap();
    assert_eq!(plan.tiers[0].given_bytes, 40 << 30);
    assert_eq!(plan.tiers[1].given_bytes, 32 << 30);
    assert_eq!(plan.host.as_ref().unwrap().huge_pages, 131_072);
    assert!(plan.engines[0].command.contains("--kv-offloading-size 256"));
    assert!(plan.engines[1].command.contains("--hicache-size 34"), "{:?}", plan.engines);

    // Each rank has all latents, but one copy is sufficient.
    let mut latents = self::request("deepseek-v3");
    latents.tensor_parallel = 8;
    let plan = Plan::new(&latents).unwrap();
    assert!(plan.savings[0].change.contains("one copy"), "{:?}", plan.savings);
    assert!((plan.savings[0].share() - 7.0 / 8.0).abs() < 0.001);
}

#[test]
fn native_offloading_of_vllm_takes_shared_memory() {
    let mut request = request("llama-3.1-8b");
    request.tensor_parallel = 2;
    let plan = Plan::new(&request).unwrap();
    assert_eq!(plan.host.unwrap().shm_bytes, 256 << 30);
    let note = plan.engines[0].notes.iter().find(|note| note.contains("/dev/shm")).unwrap();
    assert!(note.contains("--shm-size=256g"), "{note}");
    request.host = None;
    let plan = Plan::new(&request).unwrap();
    assert!(plan.host.is_none() && plan.engines[0].notes.is_empty(), "{:?}", plan.engines);
}

#[test]
fn sizes_below_a_unit_of_an_engine_are_not_zero() {
    let mut request = request("llama-3.1-8b");
    let engines = |request: &PlanRequest| Plan::new(request).unwrap().engines;
    request.host = Some(ByteCount::mib(512));
    let small = engines(&request);
    assert!(small[0].command.ends_with("--kv-offloading-size 0.5"), "{small:?}");
    assert!(!small[1].command.contains("hierarchical"), "{small:?}");
    assert!(small[1].notes[0].contains("a rank has 512 MiB; plan with --host 1GB"), "{small:?}");
    // 1.5 GB are 1 GB for one rank, and less than 1 GB for each of two ranks.
    request.host = Some(ByteCount::new(1_500_000_000));
    let large = engines(&request);
    assert!(large[1].command.contains("--hicache-size 1 "), "{large:?}");
    let words: Vec<&str> = large[0].command.split(' ').collect();
    let gib: f64 = words.last().unwrap().parse().unwrap();
    assert!((gib * 1_073_741_824.0 - 1_500_000_000.0).abs() < 1e-3, "{large:?}");
    request.tensor_parallel = 2;
    assert!(engines(&request)[1].notes[0].contains("plan with --host 2GB"));
}

#[test]
fn a_format_of_the_cache_is_an_option_or_a_note() {
    let mut request = request("llama-3.1-8b");
    (request.device, request.host) = (None, None);
    let formats = [
        (ElementFormat::Width(1), Ok("fp8"), Ok("fp8_e4m3")),
        (ElementFormat::NVFP4, Ok("nvfp4"), Ok("nvfp4")),
        (ElementFormat::MXFP8, Err("mxfp8 (32 elements in 33 B)"), Ok("mxfp8")),
        (ElementFormat::MXFP4, Err("mxfp4 (32 elements in 17 B)"), Err("mxfp4 (32 elements")),
        (ElementFormat::Width(4), Err("fp32 (4 B per element)"), Err("SGLang has no option")),
        (ElementFormat::Width(2), Err("without --kv-cache-dtype"), Err("add --kv-cache-dtype bf")),
    ];
    for (format, vllm, sglang) in formats {
        request.kv_element = Some(format);
        let engines = Plan::new(&request).unwrap().engines;
        for (options, expected) in engines.iter().zip([vllm, sglang]) {
            match expected {
                Ok(value) => {
                    let option = format!("--kv-cache-dtype {value}");
                    assert!(options.command.ends_with(&option), "{options:?}");
                    assert_eq!(options.notes, [""; 0], "{format}");
                }
                Err(note) => {
                    assert!(!options.command.contains("dtype"), "{options:?}");
                    assert!(options.notes[0].contains(note), "{options:?}");
                }
            }
        }
    }
}

#[test]
fn huge_pages_that_are_free_are_used_and_those_in_use_are_kept() {
    let mut request = request("llama-3.1-8b");
    let mut plan = |huge_pages, free_huge_pages| {
        let mut machine = Machine::published("cpu").unwrap();
        machine.host = Some(HostFacts {
            available_bytes: Some(1 << 30),
            huge_pages,
            free_huge_pages,
            ..HostFacts::default()
        });
        (request.device, request.machine) = (None, Some(machine));
        Plan::new(&request).unwrap()
    };
    let sysctl = |plan: &Plan| plan.host.as_ref().unwrap().sysctl.clone();
    // The tier uses 131,072 pages, all of the 256 GiB.
    let enough = plan(Some(140_000), Some(131_072));
    assert_eq!(enough.limits, []);
    assert!(sysctl(&enough).ends_with("=140000"), "{}", sysctl(&enough));
    let few = plan(Some(140_000), Some(100_000));
    assert!(sysctl(&few).ends_with("=171072"), "{}", sysctl(&few));
    let memory = &few.limits[0];
    assert_eq!(memory.limit, "host memory that is available");
    assert_eq!(memory.available, (1 << 30) + 100_000 * (2 << 20));
    assert!(sysctl(&plan(None, None)).ends_with("=131072"));
}

#[test]
fn savings_are_at_least_a_fifth() {
    let mut request = request("llama-3.1-8b");
    let changes = |request: &PlanRequest| {
        let savings = Plan::new(request).unwrap().savings;
        savings
            .into_iter()
            .map(|saving| (saving.change.clone(), saving.share()))
            .collect::<Vec<_>>()
    };
    let savings = changes(&request);
    assert_eq!(savings.len(), 2, "{savings:?}");
    assert!(savings[0].0.contains("fp8") && (savings[0].1 - 0.5).abs() < 1e-9);
    assert!((savings[1].1 - 0.2).abs() < 0.001);
    request.kv_element = Some(ElementFormat::Width(1));
    assert_eq!(changes(&request).len(), 1);
}

/// A disk with 1 GiB.
fn disk(directory: &str, file_system: Option<u64>) -> DiskFacts {
    DiskFacts { directory: directory.into(), free_bytes: 1 << 30, file_system }
}

#[test]
fn tiers_of_one_file_system_share_its_free_space() {
    let mut request = request("llama-3.1-8b");
    let tier =
        |directory: &str| DiskSpace { directory: directory.into(), bytes: ByteCount::mib(768) };
    let mut hits = |directories: [&str; 2], disks: Vec<DiskFacts>| -> Vec<String> {
        request.disks = directories.map(tier).to_vec();
        request.machine = Some(Machine { disks, ..Machine::published("cpu").unwrap() });
        let limits = Plan::new(&request).unwrap().limits;
        let of_disks = limits.iter().filter(|limit| limit.limit.starts_with("free space in"));
        of_disks.map(ToString::to_string).collect()
    };
    let both = ["/a", "/b"];
    assert_eq!(hits(both, vec![disk("/a", Some(1)), disk("/b", Some(2))]), [""; 0]);
    assert_eq!(hits(both, vec![disk("/a", None), disk("/b", None)]), [""; 0]);
    let shared = hits(both, vec![disk("/a", Some(1)), disk("/b", Some(1))]);
    assert_eq!(shared.len(), 1);
    let text = "free space in /a and /b: 1.50 GiB needed, 1 GiB available";
    assert!(shared[0].starts_with(text), "{shared:?}");
    // The same directory, once with a slash at its end.
    let same = hits(["/a", "/a/"], vec![disk("/a/", None)]);
    assert!(same[0].starts_with("free space in /a and /a/: 1.50 GiB needed"), "{same:?}");
}

#[test]
fn every_limit_is_reported_with_its_remedy() {
    let mut request = request("llama-3.1-8b");
    request.device = Some(ByteCount::gib(200));
    let mut machine = Machine::published("h200").unwrap();
    machine.host = Some(HostFacts {
        memory_bytes: Some(128 << 30),
        available_bytes: Some(64 << 30),
        huge_pages: Some(10),
        free_huge_pages: Some(7),
        memlock_bytes: Some(8 << 20),
        shm_bytes: Some(64 << 20),
    });
    machine.disks = vec![disk("/cache", None)];
    request.machine = Some(machine);
    let limits: Vec<String> =
        Plan::new(&request).unwrap().limits.iter().map(ToString::to_string).collect();
    for (number, part) in [
        (0, "device memory: 200 GiB needed"),
        (1, "host memory: 256 GiB needed, 128 GiB available"),
        (2, "host memory that is available"),
        (3, "free space in /cache: 2 TiB needed, 1 GiB available"),
        (4, "free huge pages of 2 MiB: 131072 needed, 7 available; sudo sysctl"),
        // Three pages are already in use.
        (4, "vm.nr_hugepages=131075;"),
        (5, "memlock of a process, for RDMA only: 256 GiB needed, 8 MiB available"),
        (6, "free space in /dev/shm, for vLLM's native offloading only: 256 GiB needed, 64 MiB"),
        (6, "docker run --shm-size=256g"),
    ] {
        assert!(limits[number].contains(part), "{limits:?}");
    }
    assert_eq!(limits.len(), 7);
    request.machine = Some(Machine::published("cpu").unwrap());
    let limits = Plan::new(&request).unwrap().limits;
    assert!(limits[0].remedy.contains("without --gpu-mem"), "{limits:?}");
}

#[test]
fn predictions_name_their_rates() {
    let mut request = request("llama-3.1-8b");
    (request.context, request.users) = (Some(131_072), Some(4));
    request.machine = Some(Machine::published("h200").unwrap());
    let plan = Plan::new(&request).unwrap();
    let find = |what: &str| plan.predictions.iter().find(|p| p.what == what).unwrap();
    // 16 GiB at 54.9 GB/s.
    let context = find("a context, device to host");
    assert_eq!(context.bytes, 16 << 30);
    assert!((context.seconds - 0.3129).abs() < 0.001, "{context:?}");
    assert!(context.is_measured && context.rates.contains("built-in calibration"));
    // 4 GiB took 0.23 s.
    let bring_up = find("bring-up of the pinned host tier");
    assert!((bring_up.seconds / 64.0 - 0.23).abs() < 0.01, "{bring_up:?}");
    assert!(
        !plan.predictions.iter().any(|p| p.what.contains("disk")),
        "no rate of a disk is known"
    );

    request.machine = Some(Machine::published("l40s").unwrap());
    let plan = Plan::new(&request).unwrap();
    assert!(!plan.predictions.is_empty());
    assert!(plan.predictions.iter().all(|p| !p.is_measured && p.rates.contains("published peak")));
    request.machine = Some(Machine::published("cpu").unwrap());
    assert_eq!(Plan::new(&request).unwrap().predictions, []);
}

#[test]
fn ranks_share_the_memory_and_the_disks_of_a_prediction() {
    let predictions = |ranks: u32| {
        let mut request = request("llama-3.1-8b");
        request.tensor_parallel = ranks;
        let mut machine = Machine::published("h200").unwrap();
        let rates = machine.rates.as_mut().unwrap();
        (rates.disk_write, rates.disk_read) = (rates.first_touch, rates.first_touch);
        request.machine = Some(machine);
        Plan::new(&request).unwrap().predictions
    };
    let (one, eight) = (predictions(1), predictions(8));
    assert_eq!(one.len(), eight.len());
    for (one, eight) in one.iter().zip(&eight) {
        // Each rank has an eighth of the heads, and of the tiers on the machine.
        if one.what.contains("device") {
            assert_eq!((&eight.what, eight.bytes), (&one.what, one.bytes / 8));
        } else {
            assert_eq!(eight.what, format!("{}, all ranks", one.what));
            assert_eq!((eight.bytes, eight.seconds), (one.bytes, one.seconds), "{eight:?}");
        }
    }
}

#[test]
fn a_trace_is_counted_at_the_capacities_of_the_tiers() {
    let mut request = request("llama-3.1-8b");
    request.disks.clear();
    request.device = Some(ByteCount::mib(64));
    request.host = Some(ByteCount::mib(128));
    let keys: Vec<String> = (0..40).chain(0..40).map(|key| key.to_string()).collect();
    request.trace = Some(Trace::parse(&keys.join(" ")).unwrap());
    let report = Plan::new(&request).unwrap().trace.unwrap();
    let ratio = |tiers: &str| {
        let found = report.by_capacity.iter().find(|row| row.tiers == tiers).unwrap();
        (found.blocks, found.hit_ratio)
    };
    // 32 blocks in the device are too few for a loop over 40 keys.
    assert_eq!(ratio("device"), (32, 0.0));
    assert_eq!(ratio("device + host"), (96, 0.5));
    assert!((report.largest_hit_ratio - 0.5).abs() < 1e-12);
}

#[test]
fn wrong_numbers_are_refused() {
    let refused = |change: fn(&mut PlanRequest)| {
        let mut request = request("llama-3.1-8b");
        change(&mut request);
        Plan::new(&request).unwrap_err().to_string()
    };
    assert!(refused(|r| r.block_tokens = 0).contains("block size is 0; pass 1 to 65,536"));
    assert!(refused(|r| r.chunk_tokens = 100).contains("multiple of the block size"));
    assert!(refused(|r| r.users = Some(3)).contains("without the context"));
    assert!(refused(|r| r.context = Some(0)).contains("the context is 0"));
    assert!(refused(|r| r.tensor_parallel = 3).contains("cannot be divided among 3"));
    assert!(refused(|r| r.tensor_parallel = 0).contains("tensor_parallel is 0"));
    let small = refused(|r| r.host = Some(ByteCount::kib(64)));
    assert!(
        small.contains("the tier host has 64 KiB, and one block of every group takes 2 MiB"),
        "{small}"
    );
    let large = refused(|r| r.host = Some(ByteCount::new(1 << 60)));
    assert!(
        large.contains("the most blocks of a layout take 8.00 PiB")
            || large.contains("8192.00 TiB"),
        "{large}"
    );
    let mut request = request("llama-3.1-8b");
    request.model = Model::from_config("mine", "[]");
    assert!(matches!(Plan::new(&request), Err(PlanError::Model { .. })));
}

#[test]
fn a_plan_is_the_same_after_a_trip_through_json() {
    let mut request = request("gemma-3-27b");
    request.machine = Some(Machine::published("h100").unwrap());
    (request.context, request.users) = (Some(8192), Some(16));
    let plan = Plan::new(&request).unwrap();
    let text = serde_json::to_string(&plan).unwrap();
    assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
}

#[test]
fn an_engine_without_the_model_gets_no_command() {
    for (model, part) in [("jamba-defaults", "jamba"), ("zamba2-defaults", "zamba2")] {
        let mut request = request(model);
        request.host = Some(ByteCount::gib(64));
        let engines = Plan::new(&request).unwrap().engines;
        assert!(engines[0].command.starts_with("vllm serve"), "{engines:?}");
        assert_eq!(engines[1].command, "");
        assert!(engines[1].notes[0].contains(part), "{engines:?}");
    }
    let sparse = Plan::new(&request("deepseek_v32-defaults")).unwrap().engines;
    assert!(sparse[1].notes[0].contains("--block 64"), "{sparse:?}");
}
