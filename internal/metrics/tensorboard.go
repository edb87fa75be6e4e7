package metrics

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// TensorBoard writes an event file: TFRecords of Event protobufs, of which only the fields
// below are needed, so they are encoded by hand.
//
// Tags are those of torchtitan where it has one, so that runs of both lie on the same plots;
// docs/formats.md lists them.
type TensorBoard struct {
	f   *os.File
	buf []byte
}

// CreateTensorBoard creates dir/events.out.tfevents.<unix>.<host>.<pid>. resumed is the step
// of the checkpoint that the run goes on from, 0 for a new run: TensorBoard then forgets the
// later steps of earlier files in dir.
func CreateTensorBoard(dir string, resumed int64) (*TensorBoard, error) {
	host, err := os.Hostname()
	if err != nil {
		host = "localhost" // the name only tells files apart
	}
	now := time.Now()
	name := fmt.Sprintf("events.out.tfevents.%010d.%s.%d", now.Unix(), strings.ReplaceAll(host, string(filepath.Separator), "_"), os.Getpid())
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, fmt.Errorf("TensorBoard event file: %w", err)
	}
	t := &TensorBoard{f: f}
	version := appendEventHead(nil, now, 0)
	version = appendBytes(version, fieldFileVersion, []byte("brain.Event:2"))
	session := appendEventHead(nil, now, resumed+1)
	session = appendBytes(session, fieldSessionLog, appendVarint([]byte{sessionStatus<<3 | wireVarint}, sessionStart))
	if err := t.records(version, session); err != nil {
		return nil, fmt.Errorf("%w (close: %v)", err, f.Close())
	}
	return t, nil
}

// Write appends one event with a value for each tag that the step has. A loss of NaN is
// written as NaN, which TensorBoard marks; values that are absent are left out.
func (t *TensorBoard) Write(s Step) error {
	var summary []byte
	for _, v := range scalars(s) {
		value := appendBytes(nil, valueTag, []byte(v.tag))
		value = append(value, valueSimple<<3|wireFixed32)
		value = binary.LittleEndian.AppendUint32(value, math.Float32bits(float32(v.value)))
		summary = appendBytes(summary, summaryValue, value)
	}
	event := appendBytes(appendEventHead(nil, time.Now(), s.Step), fieldSummary, summary)
	if err := t.records(event); err != nil {
		return fmt.Errorf("step %d: %w", s.Step, err)
	}
	return nil
}

// Close closes the file.
func (t *TensorBoard) Close() error {
	if err := t.f.Close(); err != nil {
		return fmt.Errorf("TensorBoard event file: %w", err)
	}
	return nil
}

type scalar struct {
	tag   string
	value Float
}

func scalars(s Step) []scalar {
	all := []scalar{
		{"loss_metrics/global_avg_loss", s.Loss},
		{"grad_norm", s.GradNorm},
		{"lr", s.LR},
		{"n_tokens_seen", Float(s.Tokens)},
	}
	optional := []scalar{
		{"time_metrics/end_to_end(s)", s.StepSeconds},
		{"time_metrics/comm_wait(s)", s.CommWaitSeconds},
		{"throughput_total(tps)", s.TokensPerSecond},
		{"throughput(tps)", s.TokensPerSecondPerDevice},
		{"tflops", s.TFLOPsPerDevice},
		{"mfu(%)", 100 * s.MFU},
		{"memory/max_active(GiB)", Float(s.MemoryBytes) / (1 << 30)},
	}
	for _, v := range optional {
		if v.value.Known() {
			all = append(all, v)
		}
	}
	if s.ValLoss != nil {
		all = append(all, scalar{"validation_metrics/loss", *s.ValLoss})
	}
	return all
}

// Field numbers of tensorflow/core/util/event.proto and framework/summary.proto.
const (
	fieldWallTime    = 1 // double, seconds since 1970
	fieldStep        = 2 // int64
	fieldFileVersion = 3 // string
	fieldSummary     = 5 // Summary
	fieldSessionLog  = 7 // SessionLog
	summaryValue     = 1 // repeated Summary.Value
	valueTag         = 1 // string
	valueSimple      = 2 // float
	sessionStatus    = 1 // enum
	sessionStart     = 1 // SessionLog.START

	wireVarint, wireFixed64, wireBytes, wireFixed32 = 0, 1, 2, 5
)

func appendEventHead(b []byte, wall time.Time, step int64) []byte {
	b = append(b, fieldWallTime<<3|wireFixed64)
	b = binary.LittleEndian.AppendUint64(b, math.Float64bits(float64(wall.UnixNano())/1e9))
	b = append(b, fieldStep<<3|wireVarint)
	return appendVarint(b, uint64(step))
}

func appendVarint(b []byte, x uint64) []byte { return binary.AppendUvarint(b, x) }

func appendBytes(b []byte, field byte, data []byte) []byte {
	b = append(b, field<<3|wireBytes)
	b = appendVarint(b, uint64(len(data)))
	return append(b, data...)
}

// records appends TFRecords in one write: length, its checksum, data, its checksum.
func (t *TensorBoard) records(data ...[]byte) error {
	t.buf = t.buf[:0]
	for _, d := range data {
		at := len(t.buf)
		t.buf = binary.LittleEndian.AppendUint64(t.buf, uint64(len(d)))
		t.buf = binary.LittleEndian.AppendUint32(t.buf, maskedCRC(t.buf[at:]))
		t.buf = append(t.buf, d...)
		t.buf = binary.LittleEndian.AppendUint32(t.buf, maskedCRC(d))
	}
	if _, err := t.f.Write(t.buf); err != nil {
		return fmt.Errorf("TensorBoard event file: %w", err)
	}
	return nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// maskedCRC is the checksum of a TFRecord. It is masked since a checksum of data that holds
// checksums is weak.
func maskedCRC(data []byte) uint32 {
	crc := crc32.Checksum(data, castagnoli)
	return (crc>>15 | crc<<17) + 0xa282ead8
}
