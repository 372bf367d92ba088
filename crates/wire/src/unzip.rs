//! Decompression of a response as it arrives.

use std::io::{self, Write};

use bytes::Bytes;
use flate2::write::GzDecoder;
use http::{HeaderMap, header::CONTENT_ENCODING};

/// Compressed bytes that are decompressed at once. They become a thousand times as many at most, so that no response
/// can fill the memory.
const PIECE_BYTES: usize = 512;

/// The encoding that lists are asked for in.
pub(super) const GZIP: &str = "gzip";

/// Decompressor of the chunks of a response, which passes on those that are not compressed.
pub(super) enum Unzip {
    Identity(Bytes),
    Gzip { decoder: Box<GzDecoder<Vec<u8>>>, rest: Bytes },
}

impl Unzip {
    /// For a response with these headers.
    pub(super) fn new(headers: &HeaderMap) -> Self {
        match headers.get(CONTENT_ENCODING) {
            Some(encoding) if encoding == GZIP => {
                Self::Gzip { decoder: Box::new(GzDecoder::new(Vec::new())), rest: Bytes::new() }
            }
            _ => Self::Identity(Bytes::new()),
        }
    }

    /// Adds a chunk as it has arrived. The one before was read to its end.
    pub(super) fn add(&mut self, chunk: Bytes) {
        let (Self::Identity(rest) | Self::Gzip { rest, .. }) = self;
        *rest = chunk;
    }

    /// The next piece of the content; `None` if more chunks are needed.
    ///
    /// # Errors
    /// The chunk is not what the headers say.
    pub(super) fn next(&mut self) -> io::Result<Option<Bytes>> {
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
        }
    }

    /// Checks that the content is complete, at the end of the response.
    ///
    /// # Errors
    /// It is not, or its checksum is wrong.
    pub(super) fn finish(&mut self) -> io::Result<()> {
        match self {
            Self::Identity(_) => Ok(()),
            Self::Gzip { decoder, .. } => decoder.try_finish(),
        }
    }
}

#[cfg(test)]
mod tests {
    use flate2::{Compression, write::GzEncoder};
    use http::HeaderValue;

    use super::*;

    fn zipped(content: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(content).unwrap();
        encoder.finish().unwrap()
    }

    /// Content of a response in these chunks, and its longest piece.
    fn read<'a>(chunks: impl Iterator<Item = &'a [u8]>) -> io::Result<(Vec<u8>, usize)> {
        let headers = [(CONTENT_ENCODING, HeaderValue::from_static(GZIP))].into_iter().collect();
        let (mut unzip, mut content, mut longest) = (Unzip::new(&headers), Vec::new(), 0);
        for chunk in chunks {
            unzip.add(Bytes::copy_from_slice(chunk));
            while let Some(piece) = unzip.next()? {
                content.extend_from_slice(&piece);
                longest = longest.max(piece.len());
            }
        }
        unzip.finish()?;
        Ok((content, longest))
    }

    #[test]
    fn content_is_the_same_wherever_chunks_end() {
        let content: Vec<u8> = (0..100_000_u32).flat_map(|number| (number / 7).to_le_bytes()).collect();
        let zipped = zipped(&content);
        for size in [1, 10, 511, 512, 513, 16_384, zipped.len()] {
            assert_eq!(read(zipped.chunks(size)).unwrap().0, content, "{size}");
        }
        let mut unzip = Unzip::new(&HeaderMap::new());
        unzip.add(Bytes::from_static(b"plain"));
        assert_eq!(unzip.next().unwrap().as_deref(), Some(&b"plain"[..]));
        assert!(unzip.next().unwrap().is_none() && unzip.finish().is_ok());
    }

    #[test]
    fn a_bomb_comes_in_small_pieces() {
        let (content, longest) = read(zipped(&vec![0; 64 << 20]).chunks(16_384)).unwrap();
        assert_eq!(content.len(), 64 << 20);
        assert!(longest <= 1 << 20, "{longest}");
    }

    #[test]
    fn broken_content_is_an_error() {
        let good = zipped(&[b'x'; 10_000]);
        let kind = |bytes: &[u8]| read(bytes.chunks(7)).unwrap_err().kind();
        assert_eq!(kind(&good[..good.len() - 1]), io::ErrorKind::InvalidInput, "half a checksum");
        assert_eq!(kind(&good[..good.len() / 2]), io::ErrorKind::UnexpectedEof);
        assert!(read(b"<html>".chunks(7)).is_err());
        let mut wrong = good.clone();
        *wrong.last_mut().unwrap() ^= 1;
        assert_eq!(kind(&wrong), io::ErrorKind::InvalidInput, "checksum");
        assert!(read([good, b"more".to_vec()].concat().chunks(7)).is_err());
    }
}
