//! Queries and answers of DNS (RFC 1035, 4).

use std::{io, iter, net::IpAddr};

use simple_dns::{CLASS, Name, Packet, PacketFlag, QTYPE, Question, RCODE, ResourceRecord, TYPE, rdata::RData};

/// Names that are followed at most, from CNAME record to CNAME record. They may lead in a circle.
const NAMES_MAX: usize = 16;

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
            Ok(DnsAnswer::Addresses(query.questions.first().map(|asked| addresses(&packet, asked)).unwrap_or_default()))
        }
        other => Err(io::Error::other(format!("it answered {other:?}"))),
    }
}

/// Addresses of the name that was asked for, or of one to which its CNAME records lead. Other records do not count.
fn addresses(packet: &Packet<'_>, asked: &Question<'_>) -> Vec<IpAddr> {
    let next = |name: &&Name<'_>| packet.answers.iter().find_map(|record| alias(record, name));
    let names: Vec<_> = iter::successors(Some(&asked.qname), next).take(NAMES_MAX).collect();
    let is_asked = |record: &&ResourceRecord<'_>| {
        record.match_qclass(asked.qclass)
            && record.match_qtype(asked.qtype)
            && names.iter().any(|name| is_same(name, &record.name))
    };
    packet.answers.iter().filter(is_asked).filter_map(|record| address(&record.rdata)).collect()
}

/// Name for which the record's name stands, if that is this one.
fn alias<'a>(record: &'a ResourceRecord<'a>, name: &Name<'_>) -> Option<&'a Name<'a>> {
    match &record.rdata {
        RData::CNAME(target) if is_same(&record.name, name) => Some(&target.0),
        _ => None,
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
    use simple_dns::rdata::{A, AAAA, CNAME};

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

    /// Answer to a query for the addresses of a name in this family, with these records.
    fn answer(name: &str, kind: TYPE, records: &[(&str, RData<'_>)]) -> Vec<IpAddr> {
        let query = encode_query(7, name, kind).unwrap();
        let mut packet = Packet::new_reply(7);
        packet.questions.push(Question::new(Name::new(name).unwrap(), QTYPE::TYPE(kind), CLASS::IN.into(), false));
        for (owner, data) in records {
            packet.answers.push(ResourceRecord::new(Name::new(owner).unwrap(), CLASS::IN, 60, data.clone()));
        }
        match parse_answer(&packet.build_bytes_vec().unwrap(), &query).unwrap() {
            DnsAnswer::Addresses(addresses) => addresses,
            DnsAnswer::Truncated => panic!("it is complete"),
        }
    }

    fn v4(last: u8) -> RData<'static> {
        RData::A(A::from(std::net::Ipv4Addr::new(192, 0, 2, last)))
    }

    fn v6(last: u16) -> RData<'static> {
        RData::AAAA(AAAA::from(std::net::Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last)))
    }

    fn cname(target: &str) -> RData<'_> {
        RData::CNAME(CNAME(Name::new(target).unwrap()))
    }

    fn ips(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn addresses_of_other_names_and_families_do_not_count() {
        let records = [("other.example", v4(1)), ("API.example", v4(2)), ("api.example", v6(3)), ("example", v4(4))];
        assert_eq!(answer("api.Example", TYPE::A, &records), ips(&["192.0.2.2"]));
        assert_eq!(answer("api.example", TYPE::AAAA, &records), ips(&["fd00::3"]));
        assert!(answer("api", TYPE::A, &records).is_empty());
    }

    #[test]
    fn names_lead_to_addresses_over_others_in_any_order_of_records() {
        let mut records = vec![
            ("b.example", v4(2)),
            ("A.example", cname("b.example")),
            ("c.example", cname("d.example")),
            ("d.example", v4(3)),
            ("b.EXAMPLE", v4(4)),
            ("api.example", cname("a.example")),
        ];
        assert_eq!(answer("api.example", TYPE::A, &records), ips(&["192.0.2.2", "192.0.2.4"]));
        records[1] = ("a.example", cname("api.example"));
        assert!(answer("api.example", TYPE::A, &records).is_empty(), "a circle");
    }
}
