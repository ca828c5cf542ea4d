use std::future::poll_fn;

use http_body::Body as _;
use prost::Message as _;
use wald_proto::v1;

use super::*;
use crate::answers::AnswerBudget;
use crate::transport::AT_DRAIN;

fn scan_kind() -> MessageDescriptor {
    descriptors()
        .get_message_by_name("wald.v1.ScanResponse")
        .unwrap()
}

fn scanned(cursor: &'static [u8]) -> Bytes {
    let message = v1::ScanResponse {
        cursor: Bytes::from_static(cursor),
        tail_lsn: Some(0),
        ..v1::ScanResponse::default()
    };
    message.encode_to_vec().into()
}

#[test]
fn event_has_the_cursor_as_its_id_and_a_line_has_none() {
    let show = |form: AnswerForm, bytes| form.message(&scan_kind(), bytes).unwrap();
    let text = r#"{"cursor":"+/8=","tail_lsn":"0"}"#;
    assert_eq!(
        show(AnswerForm::Events, scanned(b"\xfb\xff")),
        format!("id: +/8=\ndata: {text}\n\n")
    );
    assert_eq!(
        show(AnswerForm::Lines, scanned(b"\xfb\xff")),
        format!("{text}\n")
    );
    assert_eq!(
        show(AnswerForm::Events, scanned(b"")),
        "data: {\"tail_lsn\":\"0\"}\n\n"
    );
}

#[test]
fn browser_opens_a_stream_again_that_the_server_could_not_serve_now() {
    let starting = crate::status::starting(Access::Read);
    let answer = AnswerForm::Events.refusal(&starting);
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(answer.headers()[header::CONTENT_TYPE], EVENTS);
    let answer = AnswerForm::Lines.refusal(&starting);
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(answer.headers().contains_key(header::RETRY_AFTER));
    let answer = AnswerForm::Events.refusal(&Status::not_found("no log"));
    assert_eq!(answer.status(), StatusCode::NOT_FOUND);
}

#[test]
fn browsers_pause_for_a_second_or_for_as_long_as_the_server_asks() {
    for (status, pause) in [
        (crate::status::starting(Access::Read), "1000"),
        (crate::status::draining(), "1000"),
        (Status::internal("no pause is asked for"), "1000"),
        (asking_for(Duration::from_secs(5)), "5000"),
    ] {
        let event = failure(&status);
        let event = std::str::from_utf8(&event).unwrap();
        assert!(event.contains(&format!("\nretry: {pause}\n")), "{event}");
    }
}

fn asking_for(pause: Duration) -> Status {
    let details = tonic_types::ErrorDetails::with_retry_info(Some(pause));
    Status::with_error_details(Code::ResourceExhausted, "too fast", details)
}

#[test]
fn error_names_code_status_and_every_detail() {
    let status = crate::status::not_allowed("p", "read", None, Access::Write);
    let shown = error(StatusCode::FORBIDDEN, &status)["error"].take();
    assert_eq!(
        (&shown["code"], &shown["status"]),
        (&json!(403), &json!("PERMISSION_DENIED"))
    );
    let info = &shown["details"][0];
    assert_eq!(info["@type"], "type.googleapis.com/google.rpc.ErrorInfo");
    assert_eq!(
        (&info["reason"], &info["domain"]),
        (&json!("NOT_ALLOWED"), &json!("wald.dev"))
    );
    assert_eq!(info["metadata"]["outcome"], "NOT_APPLIED");
}

#[test]
fn stream_is_one_of_events_only_if_the_client_takes_them() {
    let form = |accept: &'static str| {
        let accept = [(header::ACCEPT, HeaderValue::from_static(accept))];
        AnswerForm::of_stream(&HeaderMap::from_iter(accept))
    };
    assert_eq!(
        form("text/html, text/event-stream;q=0.9"),
        AnswerForm::Events
    );
    assert_eq!(form("*/*"), AnswerForm::Lines);
    assert_eq!(AnswerForm::of_stream(&HeaderMap::new()), AnswerForm::Lines);
}

async fn next(body: &mut TextBody) -> Option<Result<Bytes, BrokenOff>> {
    let frame = poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await?;
    Some(frame.map(|frame| frame.into_data().unwrap()))
}

fn serving() -> watch::Receiver<Phase> {
    watch::channel(Phase::Serving).1
}

#[tokio::test(start_paused = true)]
async fn client_that_takes_nothing_is_given_up_when_the_server_drains() {
    let budget = AnswerBudget::new(1 << 20);
    let (phase, receiver) = watch::channel(Phase::Serving);
    let (mut sender, _body) = TextSender::new(&AnswerShare::new(&budget), &receiver, Access::Read);
    let mut sending = Box::pin(sender.send(HeldText::small(Bytes::from_static(b"a"))));
    let waits = tokio::time::timeout(Duration::from_secs(3600), sending.as_mut());
    assert!(waits.await.is_err());
    phase.send_replace(Phase::Draining);
    let gone = tokio::time::timeout(AT_DRAIN + Duration::from_secs(1), sending);
    assert!(gone.await.unwrap().is_err());
}

#[tokio::test]
async fn text_of_an_applied_write_waits_for_no_room() {
    let budget = AnswerBudget::new(1 << 10);
    let _full = AnswerShare::new(&budget).count(1 << 10);
    let (sender, _body) = TextSender::new(&AnswerShare::new(&budget), &serving(), Access::Write);
    let text = sender
        .room_at_once(b"applied")
        .of(Bytes::from_static(b"{}"));
    assert_eq!(budget.bytes(), (1 << 10) + text.bytes.len() as u64);
}

#[tokio::test(start_paused = true)]
async fn slow_client_loses_answers_to_reads_while_others_wait() {
    assert!(unread_while_others_wait(Access::Read).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn slow_client_loses_no_answer_to_a_write_while_others_wait() {
    assert!(unread_while_others_wait(Access::Write).await.is_ok());
}

/// Sends a text that its client does not take for a minute, while others wait for the memory of answers. Fails if the sender gives up.
async fn unread_while_others_wait(access: Access) -> Result<(), Gone> {
    let budget = AnswerBudget::new(1 << 10);
    let share = AnswerShare::new(&budget);
    let _held = share.count(1 << 10);
    let others = async {
        loop {
            assert!(AnswerShare::new(&budget).hold_soon(1).await.is_err());
        }
    };
    let (mut sender, _body) = TextSender::new(&share, &serving(), access);
    let sending = sender.send(HeldText::small(Bytes::from_static(b"applied")));
    tokio::select! {
        sent = tokio::time::timeout(Duration::from_secs(60), sending) => sent.unwrap_or(Ok(())),
        () = others => Ok(()),
    }
}

#[tokio::test]
async fn text_counts_until_the_port_has_taken_it() {
    let budget = AnswerBudget::new(1 << 20);
    let (mut sender, mut body) =
        TextSender::new(&AnswerShare::new(&budget), &serving(), Access::Read);
    let text = Bytes::from(vec![b'a'; PIECE_BYTES + 1]);
    let sending = tokio::spawn(async move {
        let room = sender.room(&text, true).await.unwrap();
        let sent = sender.send(room.of(text)).await;
        (sent.is_ok(), sender)
    });
    let first = next(&mut body).await.unwrap().unwrap();
    assert_eq!(
        (first.len(), budget.bytes()),
        (PIECE_BYTES, PIECE_BYTES as u64 + 1)
    );
    assert_eq!(next(&mut body).await.unwrap().unwrap().len(), 1);
    let (sent, sender) = sending.await.unwrap();
    assert!(sent && budget.bytes() == 0);
    sender.finish();
    assert!(next(&mut body).await.is_none());
}

#[tokio::test]
async fn text_that_breaks_off_is_an_error_and_no_end() {
    let budget = AnswerBudget::new(1 << 20);
    let (sender, mut body) = TextSender::new(&AnswerShare::new(&budget), &serving(), Access::Read);
    drop(sender);
    assert!(next(&mut body).await.unwrap().is_err());
    let (mut sender, body) = TextSender::new(&AnswerShare::new(&budget), &serving(), Access::Read);
    drop(body);
    assert!(
        sender
            .send(HeldText::small(Bytes::from_static(b"a")))
            .await
            .is_err()
    );
}

#[test]
fn room_of_a_text_is_enough_for_it() {
    for byte in [0_u8, 1, b'\n', b'"', b'a', 0x7f, 0xc3] {
        for size in [1, 100, 10_000] {
            let record = v1::Record {
                payload: Some(match std::str::from_utf8(&[byte]) {
                    Ok(text) => v1::record::Payload::Text(text.repeat(size)),
                    Err(_) => v1::record::Payload::Data(vec![byte; size].into()),
                }),
                lsn: Some(u64::MAX),
                time: "2026-11-29T16:43:15.293926Z".to_owned(),
                ..v1::Record::default()
            };
            let message = v1::ScanResponse {
                batches: vec![v1::RecordBatch {
                    log: "log".to_owned(),
                    records: vec![record; 50],
                    ..v1::RecordBatch::default()
                }],
                ..v1::ScanResponse::default()
            };
            let message = message.encode_to_vec();
            let room = most_text(&message);
            let text = AnswerForm::Lines
                .message(&scan_kind(), message.into())
                .unwrap();
            assert!(
                text.len() as u64 <= room,
                "{byte} {size}: {} {room}",
                text.len()
            );
        }
    }
}
