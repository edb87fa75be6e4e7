package metrics

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/cprun/cprun/internal/base/files"
)

// TensorBoard writes an event file: TFRecords of Event protobufs. They need only the fields below, so there are no
// generated types.
//
// Tags follow torchtitan where possible, so that runs of both share plots; docs/formats.md lists them.
type TensorBoard struct {
	f   appender
	buf []byte
}

// CreateTensorBoard creates events.out.tfevents.<unix>.<host>.<pid>. resumed is the step of the checkpoint of a resumed
// run, 0 for a new run: TensorBoard then drops later steps of earlier files. TensorBoard shows config as text, unless
// empty.
func CreateTensorBoard(dir *os.Root, resumed int64, config string) (*TensorBoard, error) {
	host, err := os.Hostname()
	if err != nil {
		host = "localhost" // only distinguishes files
	}
	now := time.Now()
	name := fmt.Sprintf("events.out.tfevents.%010d.%s.%d", now.Unix(),
		strings.ReplaceAll(host, string(filepath.Separator),
			"_"), os.Getpid())
	d, err := files.Create(dir, name)
	if err != nil {
		return nil, fmt.Errorf("TensorBoard event file: %w", err)
	}
	t := &TensorBoard{f: appender{File: d.File, full: func() {}}}
	head := [][]byte{versionEvent(now), sessionEvent(now, resumed)}
	if config != "" {
		head = append(head, textEvent(now, resumed, "config", config))
	}
	err = t.records(head...)
	if err == nil {
		err = d.Rename()
	}
	if err != nil {
		return nil, errors.Join(err, d.Discard())
	}
	return t, nil
}

// Write appends one event with a value for each tag of the step. It writes a NaN loss as NaN, which TensorBoard marks,
// and omits absent values.
func (t *TensorBoard) Write(s Step) error {
	now := time.Now()
	events := [][]byte{stepEvent(now, s)}
	for i, sample := range s.Samples {
		events = append(events, textEvent(now, s.Step, fmt.Sprintf("samples/%d", i+1), sample.Prompt+"\n\n"+sample.Text))
	}
	if err := t.records(events...); err != nil {
		return fmt.Errorf("step %d: %w", s.Step, err)
	}
	return nil
}

// Sync does nothing: a resumed run needs no events.
func (t *TensorBoard) Sync() error { return nil }

// Close closes the file.
func (t *TensorBoard) Close() error {
	if err := errors.Join(t.f.flush(), t.f.Close()); err != nil {
		return fmt.Errorf("TensorBoard event file: %w", err)
	}
	return nil
}

type scalar struct {
	tag   string
	value Float
}

func scalars(s Step) []scalar {
	if s.Step == 0 { // the validation before the first step has no other value
		return validated(s)
	}
	var all []scalar
	if blank := !s.Loss.Known() && s.GradNorm == 0; !blank { // no targets; a diverged loss is drawn as NaN
		all = append(all, scalar{"loss_metrics/global_avg_loss", s.Loss})
	}
	all = append(all, scalar{"grad_norm", s.GradNorm}, scalar{"lr", s.LR}, scalar{"n_tokens_seen", Float(s.Tokens)})
	optional := []scalar{
		{"epoch", s.Epoch},
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
	if s.AuxLoss != nil {
		all = append(all, scalar{"aux_loss", *s.AuxLoss})
	}
	if s.ExpertImbalance != nil {
		all = append(all, scalar{"expert_imbalance", *s.ExpertImbalance})
	}
	return append(all, validated(s)...)
}

func validated(s Step) (all []scalar) {
	if s.ValLoss != nil {
		all = append(all, scalar{"validation_metrics/loss", *s.ValLoss})
	}
	for _, name := range slices.Sorted(maps.Keys(s.ValLosses)) {
		all = append(all, scalar{"validation_metrics/loss/" + name, s.ValLosses[name]})
	}
	return all
}

// These are field numbers of tensorflow/core/util/event.proto and framework/summary.proto.
const (
	fieldWallTime    = 1 // double, seconds since 1970
	fieldStep        = 2 // int64
	fieldFileVersion = 3 // string
	fieldSummary     = 5 // Summary
	fieldSessionLog  = 7 // SessionLog
	summaryValue     = 1 // repeated Summary.Value
	valueTag         = 1 // string
	valueSimple      = 2 // float
	valueTensor      = 8 // TensorProto
	valueMetadata    = 9 // SummaryMetadata
	metadataPlugin   = 1 // PluginData
	pluginName       = 1 // string
	tensorType       = 1 // enum
	tensorString     = 8 // repeated bytes
	typeString       = 7 // DataType.DT_STRING
	sessionStatus    = 1 // enum
	sessionStart     = 1 // SessionLog.START

)

func versionEvent(wall time.Time) []byte {
	version := eventHead(wall, 0)
	return appendBytes(version, fieldFileVersion, []byte("brain.Event:2"))
}

// sessionEvent returns the Event of a resumed run.
func sessionEvent(wall time.Time, resumed int64) []byte {
	session := eventHead(wall, resumed+1)
	return appendBytes(session, fieldSessionLog, appendVarint(nil, sessionStatus, sessionStart))
}

func stepEvent(wall time.Time, s Step) []byte {
	var summary []byte
	for _, v := range scalars(s) {
		value := appendBytes(nil, valueTag, []byte(v.tag))
		value = protowire.AppendTag(value, valueSimple, protowire.Fixed32Type)
		value = protowire.AppendFixed32(value, math.Float32bits(float32(v.value)))
		summary = appendBytes(summary, summaryValue, value)
	}
	return appendBytes(eventHead(wall, s.Step), fieldSummary, summary)
}

// textEvent returns the Event of a text. TensorBoard shows it as Markdown; four spaces before each line keep it
// verbatim.
func textEvent(wall time.Time, step int64, tag, text string) []byte {
	text = "    " + strings.ReplaceAll(strings.TrimRight(text, "\n"), "\n", "\n    ")
	value := appendBytes(nil, valueTag, []byte(tag))
	value = appendBytes(value, valueTensor, appendBytes(appendVarint(nil, tensorType, typeString), tensorString,
		[]byte(text)))
	value = appendBytes(value, valueMetadata, appendBytes(nil, metadataPlugin,
		appendBytes(nil, pluginName, []byte("text"))))
	return appendBytes(eventHead(wall, step), fieldSummary, appendBytes(nil, summaryValue, value))
}

// eventHead returns the time and the step at the start of every Event.
func eventHead(wall time.Time, step int64) []byte {
	b := protowire.AppendTag(nil, fieldWallTime, protowire.Fixed64Type)
	b = protowire.AppendFixed64(b, math.Float64bits(float64(wall.UnixNano())/1e9))
	return appendVarint(b, fieldStep, uint64(step))
}

func appendVarint(b []byte, field protowire.Number, x uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.VarintType), x)
}

func appendBytes(b []byte, field protowire.Number, data []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, field, protowire.BytesType), data)
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
	if err := t.f.append(t.buf); err != nil {
		return fmt.Errorf("TensorBoard event file: %w", err)
	}
	return nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// maskedCRC returns the checksum of a TFRecord. It is masked, since a checksum over data with checksums is weak.
func maskedCRC(data []byte) uint32 {
	crc := crc32.Checksum(data, castagnoli)
	return (crc>>15 | crc<<17) + 0xa282ead8
}
