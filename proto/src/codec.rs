//! How messages become bytes: prost's encoding, in buffers of the right size.
//!
//! tonic's own codec takes 8 KiB for every call before there is anything to write, keeps
//! what is left of them for as long as the call lasts, and grows by copying. Here a
//! stream that waits holds a few hundred bytes, and a message is encoded into memory
//! that was taken for it once.

use std::marker::PhantomData;

use bytes::{BufMut, Bytes};
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

/// What can be sent.
pub trait Encode {
    /// How many bytes it takes.
    fn length(&self) -> usize;

    /// Writes them.
    fn put(&self, buffer: &mut impl BufMut);
}

impl<M: Message> Encode for M {
    fn length(&self) -> usize {
        self.encoded_len()
    }

    fn put(&self, buffer: &mut impl BufMut) {
        self.encode_raw(buffer);
    }
}

/// A message that is encoded already, in pieces one after another: what is stored in the
/// encoding of the contract is not decoded to be sent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Encoded(Vec<Bytes>);

impl Encoded {
    /// Goes on with these bytes.
    pub fn push(&mut self, piece: impl Into<Bytes>) {
        let piece = piece.into();
        if !piece.is_empty() {
            self.0.push(piece);
        }
    }
}

impl<M: Message> From<&M> for Encoded {
    fn from(message: &M) -> Self {
        Self(vec![message.encode_to_vec().into()])
    }
}

impl Encode for Encoded {
    fn length(&self) -> usize {
        self.0.iter().map(Bytes::len).sum()
    }

    fn put(&self, buffer: &mut impl BufMut) {
        for piece in &self.0 {
            buffer.put_slice(piece);
        }
    }
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
    T: Encode + Send + 'static,
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
        ProstCodec::<U, U>::raw_decoder(settings())
    }
}

/// Writes messages, each into memory of its size.
#[derive(Debug)]
pub struct MessageEncoder<T>(PhantomData<T>);

impl<T: Encode> Encoder for MessageEncoder<T> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, item: T, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        // That there is room is all that prost checks.
        buffer.reserve(item.length());
        item.put(buffer);
        Ok(())
    }

    fn buffer_settings(&self) -> BufferSettings {
        settings()
    }
}
