//! Encoding of messages: prost's encoding, in buffers of the right size.
//!
//! tonic's own codec takes 8 KiB for every call before there is anything to write. It keeps the
//! unused part as long as the call lasts, and grows by copying. Here a waiting stream holds a
//! few hundred bytes, and a message is encoded into memory that is allocated once for it.

use std::marker::PhantomData;

use bytes::{Buf, BufMut, Bytes};
use prost::Message;
use smallvec::{SmallVec, smallvec};
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// Bytes that an answer takes before its first message. Most answers of one record fit.
const INITIAL_BYTES: usize = 256;

/// Messages that are ready one after another leave together, up to this many bytes.
const YIELD_BYTES: usize = 32 << 10;

/// A message that can be sent.
pub trait Encode {
    /// Encoded length in bytes.
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

/// A message that is already encoded, in consecutive pieces. Stored data in the encoding of the
/// contract is sent without being decoded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Encoded(SmallVec<[Bytes; 1]>);

impl Encoded {
    /// Adds a piece at the end.
    pub fn push(&mut self, piece: impl Into<Bytes>) {
        let piece = piece.into();
        if !piece.is_empty() {
            self.0.push(piece);
        }
    }

    /// Its bytes, as they lie.
    pub fn into_pieces(self) -> impl Iterator<Item = Bytes> {
        self.0.into_iter()
    }
}

impl<M: Message> From<&M> for Encoded {
    fn from(message: &M) -> Self {
        Self(smallvec![message.encode_to_vec().into()])
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

/// A message that can be received.
pub trait Decode: Sized {
    /// Reads one, of all bytes that are left.
    ///
    /// # Errors
    /// `INTERNAL` if they are no such message, as tonic's own codec has it.
    fn take(buffer: impl Buf) -> Result<Self, Status>;
}

impl<M: Message + Default> Decode for M {
    fn take(buffer: impl Buf) -> Result<Self, Status> {
        M::decode(buffer).map_err(|error| Status::internal(error.to_string()))
    }
}

/// A message that was received and not looked at.
pub struct Sent<M> {
    /// The encoding of the message.
    pub bytes: Bytes,
    message: PhantomData<fn() -> M>,
}

impl<M> Sent<M> {
    /// A message in these bytes.
    pub fn new(bytes: Bytes) -> Self {
        let message = PhantomData;
        Self { bytes, message }
    }
}

impl<M: Message> From<&M> for Sent<M> {
    fn from(message: &M) -> Self {
        Self::new(message.encode_to_vec().into())
    }
}

impl<M> Decode for Sent<M> {
    fn take(mut buffer: impl Buf) -> Result<Self, Status> {
        let length = buffer.remaining();
        Ok(Self::new(buffer.copy_to_bytes(length)))
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
    U: Decode + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = MessageEncoder<T>;
    type Decoder = MessageDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        MessageEncoder(PhantomData)
    }

    fn decoder(&mut self) -> Self::Decoder {
        MessageDecoder(PhantomData)
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
        BufferSettings::new(INITIAL_BYTES, YIELD_BYTES)
    }
}

/// Reads messages, which are whole in the buffer.
#[derive(Debug)]
pub struct MessageDecoder<U>(PhantomData<U>);

impl<U: Decode> Decoder for MessageDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        U::take(buffer).map(Some)
    }

    /// tonic takes over the memory of a whole message only while its buffer has none of its own.
    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(0, YIELD_BYTES)
    }
}
