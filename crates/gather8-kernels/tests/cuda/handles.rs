//! Memory, streams, events, errors, and a host program's handles.

use std::sync::Arc;

use gather8_kernels::cuda::{Buffer, Cuda, probe};
use gather8_kernels::{Backend, Error, Memory, Span};

use crate::{Desk, cuda};

#[test]
#[ignore = "needs a GPU"]
fn the_device_is_found_and_described() {
    let report = probe().unwrap();
    println!("{report:?}");
    assert!(report.driver_version.0 >= 11 && !report.devices.is_empty());
    let text = Cuda::new(99).unwrap_err().to_string();
    assert!(text.starts_with("cuda:99: finding the device:"), "{text}");
}

#[test]
#[ignore = "needs a GPU"]
fn bytes_travel_whatever_their_number() {
    let desk = Desk::new(cuda());
    for bytes in [0, 1, 3, 16 << 10, (16 << 10) + 1, (4 << 20) + 5, (300 << 20) + 7] {
        for memory in [Memory::Device, Memory::Host] {
            let data: Vec<u8> =
                (0..bytes).map(|i| (i as u8) ^ (i >> 8) as u8 ^ (i >> 16) as u8).collect();
            let from = Span::whole(&desk.backend.alloc(bytes as u64, memory).unwrap());
            let to = Span::whole(&desk.backend.alloc(bytes as u64, Memory::Device).unwrap());
            assert!(desk.get(&from).iter().all(|&byte| byte == 0), "fresh memory is zero");
            desk.backend.upload(&desk.stream, &data, &from).unwrap();
            desk.backend.copy(&desk.stream, &from, &to).unwrap();
            assert!(desk.get(&to) == data, "{bytes} bytes");
            desk.backend.fill(&desk.stream, &to, 7).unwrap();
            assert!(desk.get(&to).iter().all(|&byte| byte == 7));
            if memory == Memory::Host && bytes > 3 {
                assert_eq!(desk.backend.peek(&from.sub(1..4).unwrap()).unwrap(), &data[1..4]);
            }
        }
    }
    let device = Span::whole(&desk.backend.alloc(4, Memory::Device).unwrap());
    assert!(desk.backend.peek(&device).unwrap_err().to_string().contains("download it"));
    assert!(desk.backend.upload(&desk.stream, &[1], &device).is_err());
}

#[test]
#[ignore = "needs a GPU"]
fn thousands_of_uploads_keep_their_bytes() {
    let desk = Desk::new(cuda());
    let all = Span::whole(&desk.backend.alloc(8 * 5000, Memory::Device).unwrap());
    for i in 0..5000_u64 {
        let mut bytes = i.to_le_bytes();
        desk.backend.upload(&desk.stream, &bytes, &all.sub(8 * i..8 * i + 8).unwrap()).unwrap();
        bytes.fill(0xff);
    }
    let back: Vec<u64> = desk.get_as(&all);
    assert!(back.iter().copied().eq(0..5000));
}

#[test]
#[ignore = "needs a GPU"]
fn events_order_streams() {
    let backend = cuda();
    let (a, b) = (backend.stream("a").unwrap(), backend.stream("b").unwrap());
    let large = Span::whole(&backend.alloc(1 << 30, Memory::Device).unwrap());
    let mut last = [0_u8; 1];
    for round in 1..50_u8 {
        backend.fill(&a, &large, round).unwrap();
        let done = backend.record(&a).unwrap();
        backend.wait(&b, &done, "test").unwrap();
        backend.download(&b, &large.sub((1 << 30) - 1..1 << 30).unwrap(), &mut last).unwrap();
        assert_eq!(last[0], round);
        backend.wait_host(&done).unwrap();
        let back = backend.record(&b).unwrap();
        backend.wait(&a, &back, "test").unwrap();
    }
    backend.check().unwrap();
}

#[test]
#[ignore = "needs a GPU"]
fn a_host_programs_handles_serve() {
    let owner = cuda();
    // SAFETY: the context and the stream outlive everything below.
    let guest = unsafe { Cuda::from_context(owner.raw_context()) }.unwrap();
    let stream = owner.stream("host's").unwrap();
    // SAFETY: as above.
    let borrowed = unsafe { guest.borrow_stream(stream.raw(), "borrowed") };
    let memory = owner.alloc(64, Memory::Device).unwrap();
    // SAFETY: the memory is kept by the buffer itself.
    let buffer = Arc::new(unsafe {
        Buffer::from_raw(memory.address(), 64, Some(Box::new(Arc::clone(&memory))))
    });
    let span = Span::<Cuda>::new(&buffer, 16..48).unwrap();
    assert_eq!(span.address(), memory.address() + 16);
    guest.fill(&borrowed, &span, 3).unwrap();
    let mut bytes = [0; 64];
    owner.download(&stream, &Span::whole(&memory), &mut bytes).unwrap();
    assert!(
        bytes[16..48].iter().all(|&byte| byte == 3) && bytes[..16].iter().all(|&byte| byte == 0)
    );
    // Handles of one backend are no handles of the other.
    let text = guest.fill(&stream, &span, 3).unwrap_err().to_string();
    assert!(text.contains("another backend"), "{text}");
}

#[test]
#[ignore = "needs a GPU"]
fn too_much_memory_is_an_error_and_the_device_goes_on() {
    let desk = Desk::new(cuda());
    let text = desk.backend.alloc(1 << 50, Memory::Device).unwrap_err().to_string();
    assert!(text.starts_with("cuda:0: cannot allocate 1125899906842624 bytes"), "{text}");
    // All that there is, in pieces.
    let piece = 8 << 30;
    let mut pieces = Vec::new();
    let error = loop {
        match desk.backend.alloc(piece, Memory::Device) {
            Ok(buffer) => pieces.push(buffer),
            Err(error) => break error,
        }
    };
    println!("after {} pieces of 8 GiB: {error}", pieces.len());
    let Error::OutOfMemory { device, bytes, reason } = &error else { panic!("{error:?}") };
    assert_eq!((device.as_str(), *bytes), ("cuda:0", piece));
    let free = reason.split("; ").nth(1).and_then(|text| text.split(' ').next());
    assert!(free.unwrap().parse::<u64>().unwrap() < piece, "{error}");
    assert!(!error.to_string().contains('\n'), "{error}");
    drop(pieces);
    drop(desk.backend.alloc(piece, Memory::Device).unwrap());
    assert_eq!(desk.get(&desk.put(&[1_u8, 2, 3], 0)), [1, 2, 3]);
}

#[test]
#[ignore = "needs a GPU"]
fn a_failure_from_outside_stays() {
    // SAFETY: the context outlives the guest.
    let guest = unsafe { Cuda::from_context(cuda().raw_context()) }.unwrap();
    let stream = guest.stream("s").unwrap();
    let host = Span::whole(&guest.alloc(4, Memory::Host).unwrap());
    guest.check().unwrap();
    guest.fail("all-gather #3", Arc::new(std::io::Error::other("rank 2 was killed")));
    for error in [guest.check(), guest.synchronize(&stream), guest.record(&stream).map(drop)] {
        assert_eq!(error.unwrap_err().to_string(), "rank 2 was killed");
    }
    assert_eq!(guest.peek(&host).unwrap(), [0; 4], "host memory may hold the reason");
}
