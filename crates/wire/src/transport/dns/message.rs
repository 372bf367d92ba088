//! Queries and answers of DNS (RFC 1035, 4).

use std::{io, net::IpAddr};

use simple_dns::{CLASS, Name, Packet, PacketFlag, QTYPE, Question, RCODE, TYPE, rdata::RData};

/// A question for the addresses of a name, of one family.
///
/// # Errors
/// The name is too long, or a label of it.
pub(super) fn encode_query(id: u16, name: &str, kind: TYPE) -> io::Result<Vec<u8>> {
    let name = Name::new(name).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error.to_string()))?;
    let mut packet = Packet::new_query(id);
    packet.set_flags(PacketFlag::RECURSION_DESIRED);
    packet.questions.push(Question::new(name, QTYPE::TYPE(kind), CLASS::IN.into(), false));
    packet.build_bytes_vec().map_err(|error| io::Error::other(error.to_string()))
}

/// Answer of a nameserver.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum DnsAnswer {
    Addresses(Vec<IpAddr>),
    /// It is longer than a datagram.
    Truncated,
}

/// Reads the answer to a query, whose number and question it has to repeat.
///
/// # Errors
/// Of the kind `InvalidData`: it is not an answer to this query. Of another kind: the nameserver refuses.
pub(super) fn parse_answer(bytes: &[u8], query: &[u8]) -> io::Result<DnsAnswer> {
    let parse =
        |bytes| Packet::parse(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()));
    let (packet, query) = (parse(bytes)?, parse(query)?);
    // A server that cannot read the question may leave it out.
    let is_repeated =
        |(one, other): (&Question<'_>, &Question<'_>)| one.qtype == other.qtype && is_same(&one.qname, &other.qname);
    let has_question = packet.questions.is_empty() && packet.rcode() != RCODE::NoError
        || packet.questions.len() == query.questions.len()
            && packet.questions.iter().zip(&query.questions).all(is_repeated);
    if packet.id() != query.id() || !packet.has_flags(PacketFlag::RESPONSE) || !has_question {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not an answer to this query"));
    }
    match packet.rcode() {
        _ if packet.has_flags(PacketFlag::TRUNCATION) => Ok(DnsAnswer::Truncated),
        RCODE::NoError | RCODE::NameError => {
            Ok(DnsAnswer::Addresses(packet.answers.iter().filter_map(|record| address(&record.rdata)).collect()))
        }
        other => Err(io::Error::other(format!("it answered {other:?}"))),
    }
}

/// Whether two names are the same, in whatever case (RFC 4343).
fn is_same(one: &Name<'_>, other: &Name<'_>) -> bool {
    one.to_string().eq_ignore_ascii_case(&other.to_string())
}

fn address(rdata: &RData<'_>) -> Option<IpAddr> {
    match rdata {
        RData::A(record) => Some(IpAddr::from(record.address.to_be_bytes())),
        RData::AAAA(record) => Some(IpAddr::from(record.address.to_be_bytes())),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_complete_answer_to_this_query_counts() {
        let question = encode_query(7, "api.example", TYPE::A).unwrap();
        let parse = |bytes: &[u8]| parse_answer(bytes, &question);
        assert!(parse(&question).is_err(), "a question is no answer");
        let mut answer = question.clone();
        answer[2] |= 0x80;
        assert_eq!(parse(&answer).unwrap(), DnsAnswer::Addresses(Vec::new()));
        for other in [(8, "api.example", TYPE::A), (7, "apo.example", TYPE::A), (7, "api.example", TYPE::AAAA)] {
            let (id, name, kind) = other;
            let mut other = encode_query(id, name, kind).unwrap();
            other[2] |= 0x80;
            assert!(parse(&other).is_err(), "another question's answer: {name} {kind:?} {id}");
        }
        answer[3] = 2;
        assert!(parse(&answer).unwrap_err().to_string().contains("ServerFailure"));
        let refusal = [&answer[..4], &[0; 8]].concat();
        assert!(parse(&refusal).unwrap_err().to_string().contains("ServerFailure"));
        answer[2] |= 0x02;
        assert_eq!(parse(&answer).unwrap(), DnsAnswer::Truncated);
        for length in 0..answer.len() {
            drop(parse(&answer[..length]));
        }
    }
}
