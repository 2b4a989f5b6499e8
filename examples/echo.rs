//! An echo server over tokio: messages are read from the socket into registered memory, and sent back from
//! where they lie. What a server with an RDMA side would post as it is.
//!
//! `cargo run --features codec --example echo [DEVICE | --soft]`

#![allow(clippy::print_stdout)]

use std::error::Error;

use pinpool::{
    Device, Pool,
    codec::{FrameReader, FrameWriter},
};
use tokio::net::{TcpListener, TcpStream};

const MAX: usize = 16 << 10;

async fn serve(stream: TcpStream, pool: Pool) -> Result<u64, Box<dyn Error + Send + Sync>> {
    let (from, to) = stream.into_split();
    let (mut reader, mut writer) = (FrameReader::new(from, &pool, MAX), FrameWriter::new(to, MAX));
    let mut messages = 0;
    while let Some(message) = reader.next().await? {
        // Ready to be posted: the bytes that came from the socket, with their key.
        let sge = message.sge();
        assert_eq!(sge.length as usize, message.len());
        writer.send(&message).await?;
        messages += 1;
    }
    Ok(messages)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let device = match std::env::args().nth(1).as_deref() {
        None => Device::first()?,
        Some("--soft") => Device::soft(),
        Some(name) => Device::open(name)?,
    };
    let pool = Pool::builder().device(device).capacity(16 << 20).build()?;

    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let client = TcpStream::connect(listener.local_addr()?);
    let (server, client) = tokio::join!(listener.accept(), client);
    let server = tokio::spawn(serve(server?.0, pool.clone()));

    let (from, to) = client?.into_split();
    let (mut reader, mut writer) = (FrameReader::new(from, &pool, MAX), FrameWriter::new(to, MAX));
    for i in 0..1_000usize {
        let said = vec![i as u8; i * 16];
        writer.send(&said).await?;
        let heard = reader.next().await?.ok_or("the server hung up")?;
        assert_eq!(heard[..], said[..]);
    }
    drop(writer);
    let messages = server.await??;
    println!("{messages} messages there and back, none of them copied by the server");
    Ok(())
}
