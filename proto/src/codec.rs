//! How messages become bytes: prost's encoding, in buffers of the right size.
//!
//! tonic's own codec takes 8 KiB for every call before there is anything to write, keeps
//! what is left of them for as long as the call lasts, and grows by copying. Here a
//! stream that waits holds a few hundred bytes, and a message is encoded into memory
//! that was taken for it once.

use std::marker::PhantomData;

use prost::Message;
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, EncodeBuf, Encoder};
use tonic_prost::{ProstCodec, ProstDecoder};

/// What a call takes before its first message: most answers of one record fit.
const INITIAL_BYTES: usize = 256;

/// Messages that are ready one after another leave together, up to this many bytes.
const YIELD_BYTES: usize = 32 << 10;

fn settings() -> BufferSettings {
    BufferSettings::new(INITIAL_BYTES, YIELD_BYTES)
}

/// The codec of all services: writes `T`, reads `U`.
#[derive(Debug)]
pub struct MessageCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for MessageCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for MessageCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = MessageEncoder<T>;
    type Decoder = ProstDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        MessageEncoder(PhantomData)
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<T, U>::raw_decoder(settings())
    }
}

/// Writes messages, each into memory of its size.
#[derive(Debug)]
pub struct MessageEncoder<T>(PhantomData<T>);

impl<T: Message> Encoder for MessageEncoder<T> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, item: T, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.reserve(item.encoded_len());
        item.encode(buffer)
            .map_err(|error| Status::internal(error.to_string()))
    }

    fn buffer_settings(&self) -> BufferSettings {
        settings()
    }
}
