package dev.wald;

import dev.wald.v1.AppendBatchResponse;
import dev.wald.v1.AppendResponse;
import dev.wald.v1.LogAppend;
import dev.wald.v1.Record;
import java.util.ArrayList;
import java.util.List;
import java.util.OptionalInt;
import java.util.OptionalLong;

/** Answers of the server as values of this package. */
final class Protos {
  private Protos() {}

  static OptionalLong optional(boolean there, long value) {
    return there ? OptionalLong.of(value) : OptionalLong.empty();
  }

  static List<Header> headers(Record record) {
    return record.getHeadersList().stream().map(header -> new Header(header.getKey(), header.getValue())).toList();
  }

  static List<Record> records(List<NewRecord> records) {
    List<Record> protos = new ArrayList<>(records.size());
    for (NewRecord record : records) {
      protos.add(record.proto());
    }
    return protos;
  }

  static RecordBatch batch(dev.wald.v1.RecordBatch batch) {
    if (!batch.hasFirstLsn()) {
      throw Failure.brokenContract("RecordBatch.first_lsn").exception();
    }
    List<StoredRecord> records = new ArrayList<>(batch.getRecordsCount());
    for (Record record : batch.getRecordsList()) {
      long micros = record.getTimestampUs() == 0 ? batch.getTimestampUs() : record.getTimestampUs();
      OptionalInt crc32c = record.hasCrc32C() ? OptionalInt.of(record.getCrc32C()) : OptionalInt.empty();
      records.add(new StoredRecord(batch.getFirstLsn() + records.size(), record.getData(), headers(record),
          Times.ofMicros(micros), crc32c));
    }
    return new RecordBatch(batch.getLog(), batch.getLogId(), List.copyOf(records));
  }

  static Ack ack(AppendResponse answer) {
    if (!answer.hasLsn()) {
      throw Failure.brokenContract("AppendResponse.lsn").exception();
    }
    return new Ack(answer.getLsn(), Times.ofMicros(answer.getTimestampUs()), Durability.of(answer.getDurability()),
        answer.getDeduplicated(), answer.getDurableLsn(), optional(answer.hasReplicatedLsn(), answer.getReplicatedLsn()),
        optional(answer.hasPosition(), answer.getPosition()), answer.getRecoveryEpoch(), answer.getLogId());
  }

  static BatchAck batchAck(AppendBatchResponse answer) {
    List<LogAck> appends = new ArrayList<>(answer.getAppendsCount());
    for (LogAppend part : answer.getAppendsList()) {
      if (!part.hasFirstLsn() || !part.hasNextLsn()) {
        throw Failure.brokenContract("LogAppend.first_lsn or next_lsn").exception();
      }
      appends.add(new LogAck(part.getLog(), part.getFirstLsn(), part.getNextLsn(), Times.ofMicros(part.getTimestampUs()),
          part.getDeduplicated(), part.getDurableLsn(), optional(part.hasReplicatedLsn(), part.getReplicatedLsn()), part.getLogId()));
    }
    return new BatchAck(List.copyOf(appends), Durability.of(answer.getDurability()),
        optional(answer.hasPosition(), answer.getPosition()), answer.getRecoveryEpoch());
  }

  static Cursor cursor(dev.wald.v1.Cursor cursor) {
    if (!cursor.hasLsn()) {
      throw Failure.brokenContract("Cursor.lsn").exception();
    }
    return new Cursor(cursor.getLog(), cursor.getName(), cursor.getLsn(), cursor.getLogId(), Times.of(cursor.getUpdateTime()));
  }

  static LogInfo log(dev.wald.v1.Log log) {
    return new LogInfo(log.getName(), log.getLogId(), log.getConfig(), log.getFirstLsn(), log.getTailLsn(), log.getDurableLsn(),
        optional(log.hasReplicatedLsn(), log.getReplicatedLsn()), log.getWriterEpoch(), log.getStoredBytes(),
        Times.of(log.getCreateTime()), Times.of(log.getUpdateTime()), log.getFirstProducerEpoch());
  }
}
