//! Decompression of a response as it arrives.

use std::io::{self, Write};

use bytes::{Buf, Bytes};
use flate2::write::GzDecoder;
use http::{HeaderMap, HeaderValue, header::CONTENT_ENCODING};
use zstd_safe::{DCtx, DParameter, InBuffer, OutBuffer, is_error_kind, zstd_sys::ZSTD_ErrorCode};

/// Bytes of gzip that are decompressed at once. They become a thousand times as many at most, so that no response can
/// fill the memory.
const PIECE_BYTES: usize = 512;

/// Bytes that one step makes of zstd.
const ZSTD_PIECE_BYTES: usize = 16 << 10;

/// Longest distance of a repetition in zstd, as a power of two: 256 KiB. The decoder has memory for it, and for 384 KiB
/// of blocks.
const ZSTD_WINDOW_LOG_MAX: u32 = 18;

const GZIP: &str = "gzip";
const ZSTD: &str = "zstd";

/// Error of content that is not the zstd that the agent can read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum ZstdError {
    #[error("its zstd has a window of more than {} KiB", 1 << (ZSTD_WINDOW_LOG_MAX - 10))]
    Window,
    #[error("the checksum of its zstd is wrong")]
    Checksum,
    #[error("it is not zstd, or a part of it is wrong")]
    Broken,
    #[error("there is no memory to decompress it")]
    Memory,
}

impl ZstdError {
    fn new(code: zstd_safe::ErrorCode) -> Self {
        let is = |kind| is_error_kind(code, kind);
        match () {
            () if is(ZSTD_ErrorCode::ZSTD_error_frameParameter_windowTooLarge) => Self::Window,
            () if is(ZSTD_ErrorCode::ZSTD_error_checksum_wrong) => Self::Checksum,
            () if is(ZSTD_ErrorCode::ZSTD_error_memory_allocation) => Self::Memory,
            () => Self::Broken,
        }
    }
}

impl From<ZstdError> for io::Error {
    fn from(error: ZstdError) -> Self {
        Self::new(io::ErrorKind::InvalidData, error)
    }
}

/// Whether the error is that of zstd, in place of which gzip may be readable.
pub(crate) fn is_zstd_error(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|error| error.is::<ZstdError>())
}

/// Value of the Accept-Encoding header for lists.
pub(crate) fn accepted(with_zstd: bool) -> HeaderValue {
    HeaderValue::from_static(if with_zstd { "zstd, gzip" } else { GZIP })
}

/// Decompressor of the chunks of a response, which passes on those that are not compressed.
pub(crate) enum Decompressor {
    Identity(Bytes),
    Gzip { decoder: Box<GzDecoder<Vec<u8>>>, rest: Bytes },
    Zstd { decoder: Zstd, rest: Bytes },
}

impl Decompressor {
    /// For a response with these headers.
    pub(crate) fn new(headers: &HeaderMap) -> Self {
        match headers.get(CONTENT_ENCODING) {
            Some(encoding) if encoding == GZIP => {
                Self::Gzip { decoder: Box::new(GzDecoder::new(Vec::new())), rest: Bytes::new() }
            }
            Some(encoding) if encoding == ZSTD => Self::Zstd { decoder: Zstd::default(), rest: Bytes::new() },
            _ => Self::Identity(Bytes::new()),
        }
    }

    /// Adds a chunk as it has arrived. The one before was read to its end.
    pub(crate) fn add(&mut self, chunk: Bytes) {
        let (Self::Identity(rest) | Self::Gzip { rest, .. } | Self::Zstd { rest, .. }) = self;
        *rest = chunk;
    }

    /// The next piece of the content; `None` if more chunks are needed.
    ///
    /// # Errors
    /// The chunk is not what the headers say.
    pub(crate) fn next(&mut self) -> io::Result<Option<Bytes>> {
        match self {
            Self::Identity(rest) => Ok(Some(std::mem::take(rest)).filter(|chunk| !chunk.is_empty())),
            Self::Gzip { decoder, rest } => {
                while !rest.is_empty() {
                    let piece = rest.split_to(PIECE_BYTES.min(rest.len()));
                    decoder.write_all(&piece)?;
                    // Small pieces of output stay until there are more.
                    if decoder.get_ref().len() >= PIECE_BYTES || rest.is_empty() {
                        decoder.flush()?;
                        return Ok(Some(std::mem::take(decoder.get_mut()).into()));
                    }
                }
                Ok(None)
            }
            Self::Zstd { decoder, rest } => decoder.next(rest),
        }
    }

    /// Checks that the content is complete, at the end of the response.
    ///
    /// # Errors
    /// It is not, or its checksum is wrong.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        match self {
            Self::Identity(_) => Ok(()),
            Self::Gzip { decoder, .. } => decoder.try_finish(),
            Self::Zstd { decoder, .. } => decoder.finish(),
        }
    }
}

/// Decompressor of zstd: one frame, or several after each other.
#[derive(Default)]
pub(crate) struct Zstd {
    /// Made with the first chunk.
    context: Option<DCtx<'static>>,
    /// The last frame has ended.
    is_complete: bool,
    /// There may be more output without more input.
    is_full: bool,
}

impl Zstd {
    fn next(&mut self, rest: &mut Bytes) -> io::Result<Option<Bytes>> {
        while self.is_full || !rest.is_empty() {
            let mut piece = Vec::with_capacity(ZSTD_PIECE_BYTES);
            let (mut input, mut output) = (InBuffer::around(rest), OutBuffer::around(&mut piece));
            let left = self.context()?.decompress_stream(&mut output, &mut input).map_err(ZstdError::new)?;
            let read_bytes = input.pos();
            rest.advance(read_bytes);
            self.is_complete = left == 0;
            self.is_full = !self.is_complete && piece.len() == piece.capacity();
            if !piece.is_empty() {
                return Ok(Some(piece.into()));
            }
        }
        Ok(None)
    }

    fn context(&mut self) -> Result<&mut DCtx<'static>, ZstdError> {
        if self.context.is_none() {
            let mut context = DCtx::try_create().ok_or(ZstdError::Memory)?;
            context.set_parameter(DParameter::WindowLogMax(ZSTD_WINDOW_LOG_MAX)).map_err(ZstdError::new)?;
            self.context = Some(context);
        }
        self.context.as_mut().ok_or(ZstdError::Memory)
    }

    fn finish(&self) -> io::Result<()> {
        if self.is_complete { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}

#[cfg(test)]
mod tests {
    use flate2::{Compression, write::GzEncoder};
    use zstd_safe::{CCtx, CParameter};

    use super::*;

    fn gzip(content: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(content).unwrap();
        encoder.finish().unwrap()
    }

    /// A frame of zstd with a checksum.
    fn zstd_of_window(content: &[u8], window_log: u32) -> Vec<u8> {
        let mut context = CCtx::create();
        for parameter in [
            CParameter::CompressionLevel(1),
            CParameter::WindowLog(window_log),
            CParameter::ChecksumFlag(true),
            CParameter::ContentSizeFlag(false),
        ] {
            context.set_parameter(parameter).unwrap();
        }
        let mut zipped = Vec::with_capacity(zstd_safe::compress_bound(content.len()));
        context.compress2(&mut zipped, content).unwrap();
        zipped
    }

    fn zstd(content: &[u8]) -> Vec<u8> {
        zstd_of_window(content, ZSTD_WINDOW_LOG_MAX)
    }

    /// Content of a response in these chunks, and its longest piece.
    fn read<'a>(encoding: &'static str, chunks: impl Iterator<Item = &'a [u8]>) -> io::Result<(Vec<u8>, usize)> {
        let headers = [(CONTENT_ENCODING, HeaderValue::from_static(encoding))].into_iter().collect();
        let (mut decompressor, mut content, mut longest) = (Decompressor::new(&headers), Vec::new(), 0);
        for chunk in chunks {
            decompressor.add(Bytes::copy_from_slice(chunk));
            while let Some(piece) = decompressor.next()? {
                content.extend_from_slice(&piece);
                longest = longest.max(piece.len());
            }
        }
        decompressor.finish()?;
        Ok((content, longest))
    }

    fn numbers() -> Vec<u8> {
        (0..100_000_u32).flat_map(|number| (number / 7).to_le_bytes()).collect()
    }

    #[test]
    fn content_is_the_same_wherever_chunks_end() {
        let content = numbers();
        for (encoding, zipped) in [(GZIP, gzip(&content)), (ZSTD, zstd(&content))] {
            for size in [1, 10, 511, 512, 513, 16_384, zipped.len()] {
                assert_eq!(read(encoding, zipped.chunks(size)).unwrap().0, content, "{encoding} {size}");
            }
        }
        let mut decompressor = Decompressor::new(&HeaderMap::new());
        decompressor.add(Bytes::from_static(b"plain"));
        assert_eq!(decompressor.next().unwrap().as_deref(), Some(&b"plain"[..]));
        assert!(decompressor.next().unwrap().is_none() && decompressor.finish().is_ok());
    }

    #[test]
    fn a_short_content_may_be_split_anywhere() {
        let content: Vec<u8> = numbers().into_iter().step_by(29).take(3000).collect();
        let zipped = zstd(&content);
        for at in 0..=zipped.len() {
            let (first, second) = zipped.split_at(at);
            assert_eq!(read(ZSTD, [first, second].into_iter()).unwrap().0, content, "{at}");
        }
    }

    #[test]
    fn frames_of_zstd_may_follow_each_other() {
        let zipped = [zstd(b"one, "), zstd(b""), zstd(b"two")].concat();
        for size in [1, 3, zipped.len()] {
            assert_eq!(read(ZSTD, zipped.chunks(size)).unwrap().0, b"one, two");
        }
    }

    #[test]
    fn a_bomb_comes_in_small_pieces() {
        let zeros = vec![0; 64 << 20];
        for (encoding, zipped, longest_max) in [(GZIP, gzip(&zeros), 1 << 20), (ZSTD, zstd(&zeros), ZSTD_PIECE_BYTES)] {
            let headers = [(CONTENT_ENCODING, HeaderValue::from_static(encoding))].into_iter().collect();
            let (mut decompressor, mut sum, mut longest) = (Decompressor::new(&headers), 0, 0);
            decompressor.add(zipped.into());
            while let Some(piece) = decompressor.next().unwrap() {
                (sum, longest) = (sum + piece.len(), longest.max(piece.len()));
            }
            decompressor.finish().unwrap();
            assert_eq!(sum, 64 << 20, "{encoding}");
            assert!(longest <= longest_max, "{encoding}: {longest}");
            if let Decompressor::Zstd { decoder, .. } = decompressor {
                let memory = decoder.context.unwrap().sizeof();
                assert!(memory <= 900 << 10, "{memory} bytes");
            }
        }
    }

    #[test]
    fn broken_content_is_an_error() {
        let good = gzip(&[b'x'; 10_000]);
        let kind = |bytes: &[u8]| read(GZIP, bytes.chunks(7)).unwrap_err().kind();
        assert_eq!(kind(&good[..good.len() - 1]), io::ErrorKind::InvalidInput, "half a checksum");
        assert_eq!(kind(&good[..good.len() / 2]), io::ErrorKind::UnexpectedEof);
        assert!(read(GZIP, b"<html>".chunks(7)).is_err());
        let mut wrong = good.clone();
        *wrong.last_mut().unwrap() ^= 1;
        assert_eq!(kind(&wrong), io::ErrorKind::InvalidInput, "checksum");
        assert!(read(GZIP, [good, b"more".to_vec()].concat().chunks(7)).is_err());
    }

    #[test]
    fn broken_zstd_is_an_error_that_says_why() {
        let content = numbers();
        let good = zstd(&content);
        let error = |bytes: &[u8]| read(ZSTD, bytes.chunks(700)).unwrap_err();
        for length in [0, 1, 5, good.len() / 2, good.len() - 4, good.len() - 1] {
            let cut = error(&good[..length]);
            assert_eq!((cut.kind(), is_zstd_error(&cut)), (io::ErrorKind::UnexpectedEof, false), "{length}");
        }
        let text = |bytes: &[u8]| {
            let error = error(bytes);
            assert!(is_zstd_error(&error), "{error}");
            error.to_string()
        };
        let mut wrong = good.clone();
        *wrong.last_mut().unwrap() ^= 1;
        assert_eq!(text(&wrong), "the checksum of its zstd is wrong");
        assert_eq!(text(&zstd_of_window(&content, 19)), "its zstd has a window of more than 256 KiB");
        assert_eq!(text(b"<html>"), "it is not zstd, or a part of it is wrong");
        assert_eq!(text(&[good, b"more".to_vec()].concat()), "it is not zstd, or a part of it is wrong");
    }

    #[test]
    fn damaged_zstd_ends_in_an_error_or_in_content() {
        let good = zstd(&numbers());
        for at in (0..good.len()).step_by(1 + good.len() / 400) {
            let mut wrong = good.clone();
            wrong[at] = wrong[at].wrapping_mul(31).wrapping_add(7);
            drop(read(ZSTD, wrong.chunks(16_384)));
        }
    }
}
