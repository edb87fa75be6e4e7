package metrics

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/cprun/cprun/internal/base/must"
)

// An event is a decoded record.
type event struct {
	wall    float64
	step    int64
	version string
	session uint64
	values  map[string]float32
}

// decodeEvents reads a TensorBoard event file and checks every checksum.
func decodeEvents(data []byte) ([]event, error) {
	var events []event
	for len(data) > 0 {
		if len(data) < 16 {
			return nil, io.ErrUnexpectedEOF
		}
		n := binary.LittleEndian.Uint64(data)
		if got, want := binary.LittleEndian.Uint32(data[8:]), maskedCRC(data[:8]); got != want {
			return nil, fmt.Errorf("checksum of a length is %x, want %x", got, want)
		}
		body := data[12 : 12+n]
		if got, want := binary.LittleEndian.Uint32(data[12+n:]), maskedCRC(body); got != want {
			return nil, fmt.Errorf("checksum of a record is %x, want %x", got, want)
		}
		data = data[16+n:]
		e := event{values: map[string]float32{}}
		err := decodeFields(body, func(field int, num uint64, data []byte) error {
			switch field {
			case fieldWallTime:
				e.wall = math.Float64frombits(num)
			case fieldStep:
				e.step = int64(num)
			case fieldFileVersion:
				e.version = string(data)
			case fieldSessionLog:
				return decodeFields(data, func(_ int, num uint64, _ []byte) error { e.session = num; return nil })
			case fieldSummary:
				return decodeFields(data, e.value)
			default:
				return fmt.Errorf("unknown field %d of an event", field)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
		events = append(events, e)
	}
	return events, nil
}

func (e *event) value(_ int, _ uint64, data []byte) error {
	var tag string
	var x float32
	err := decodeFields(data, func(field int, num uint64, data []byte) error {
		if field == valueTag {
			tag = string(data)
		} else {
			x = math.Float32frombits(uint32(num))
		}
		return nil
	})
	e.values[tag] = x
	return err
}

func decodeFields(data []byte, f func(field int, num uint64, data []byte) error) error {
	for len(data) > 0 {
		field, kind, n := protowire.ConsumeTag(data)
		if n < 0 {
			return protowire.ParseError(n)
		}
		data = data[n:]
		var num uint64
		var body []byte
		switch kind {
		case protowire.VarintType:
			num, n = protowire.ConsumeVarint(data)
		case protowire.Fixed64Type:
			num, n = protowire.ConsumeFixed64(data)
		case protowire.Fixed32Type:
			var x uint32
			x, n = protowire.ConsumeFixed32(data)
			num = uint64(x)
		case protowire.BytesType:
			body, n = protowire.ConsumeBytes(data)
		default:
			return fmt.Errorf("wire type %d", kind)
		}
		if n < 0 {
			return protowire.ParseError(n)
		}
		data = data[n:]
		if err := f(int(field), num, body); err != nil {
			return err
		}
	}
	return nil
}

func TestTensorBoard(t *testing.T) {
	dir := t.TempDir()
	tb := must.Have(CreateTensorBoard(rootAt(t, dir), 300, "train:\n  steps: 3\n"))
	val := Float(2.5)
	second := step(302)
	second.Loss, second.MFU, second.ValLoss = Absent, 0.5, &val
	for _, s := range []Step{step(301), second} {
		must.Do(t, tb.Write(s))
	}
	must.Do(t, tb.Close())
	host, _ := os.Hostname()
	files, _ := filepath.Glob(filepath.Join(dir, fmt.Sprintf("events.out.tfevents.*.%s.%d", host, os.Getpid())))
	if len(files) != 1 {
		t.Fatalf("event files %v, want one", files)
	}
	data := must.Have(os.ReadFile(files[0]))
	events := must.Have(decodeEvents(data))
	if len(events) != 5 {
		t.Fatalf("%d events, want 5", len(events))
	}
	// TensorBoard writes the same with tf.summary.text, except the display name.
	if text := textEvent(time.Unix(1, 0), 7, "config", "a\nb\n"); !bytes.HasSuffix(text,
		[]byte("\n\x06config"+"B\x0f\x08\x07B\x0b    a\n    b"+"J\x08\n\x06\n\x04text")) ||
		!bytes.Contains(data, []byte("      steps: 3")) {
		t.Errorf("a text is %q", text)
	}
	events = slices.Delete(events, 2, 3)
	if events[0].version != "brain.Event:2" || events[0].wall < 1e9 {
		t.Errorf("first event is %+v, want the file version and a time", events[0])
	}
	if events[1].session != sessionStart || events[1].step != 301 {
		t.Errorf("second event is %+v, want a session start at step 301", events[1])
	}
	first := events[2]
	if first.step != 301 || first.values["lr"] != 3e-4 || first.values["throughput(tps)"] != 2048 ||
		first.values["memory/max_active(GiB)"] != 3 {
		t.Errorf("step 301 is %+v", first)
	}
	if _, there := first.values["mfu(%)"]; there || len(first.values) != 10 {
		t.Errorf("step 301 has %d tags, want 10 and no mfu: %v", len(first.values), first.values)
	}
	last := events[3]
	if loss := last.values["loss_metrics/global_avg_loss"]; loss == loss {
		t.Errorf("loss of step 302 is %v, want NaN", loss)
	}
	if last.values["mfu(%)"] != 50 || last.values["validation_metrics/loss"] != 2.5 {
		t.Errorf("step 302 is %+v", last)
	}
}

// TestMaskedCRC checks the checksum of the first record of every event file: after the length 24 come the bytes a3 7f
// 4b 22.
func TestMaskedCRC(t *testing.T) {
	length := binary.LittleEndian.AppendUint64(nil, 24)
	got := hex.EncodeToString(binary.LittleEndian.AppendUint32(nil, maskedCRC(length)))
	if want := "a37f4b22"; got != want {
		t.Errorf("maskedCRC(24) = %s, want %s", got, want)
	}
}

// TestEventBytes compares events with bytes that were written before protowire encoded them.
func TestEventBytes(t *testing.T) {
	wall := time.Unix(1700000000, 250000000)
	long := step(1 << 40)
	long.Loss, long.MFU = Absent, 0.5
	var got strings.Builder
	for _, event := range []struct {
		name string
		data []byte
	}{
		{"version", versionEvent(wall)},
		{"new session", sessionEvent(wall, 0)},
		{"session", sessionEvent(wall, 300)},
		{"step", stepEvent(wall, step(301))},
		{"large step", stepEvent(wall, long)},
		{"negative step", stepEvent(wall, Step{Step: -1, Epoch: Absent, Loss: Float(math.Inf(-1)),
			StepSeconds: Absent})},
	} {
		fmt.Fprintf(&got, "%s: %x\n", event.name, event.data)
	}
	want := must.Have(os.ReadFile("testdata/events.txt"))
	if got.String() != string(want) {
		t.Errorf("events are\n%swant\n%s", got.String(), want)
	}
}

// A step without targets has no loss in the plot; a diverged loss is drawn as NaN.
func TestBlankStepsDrawNoLoss(t *testing.T) {
	for norm, want := range map[Float]bool{0: false, Float(math.Inf(1)): true} {
		drawn := slices.ContainsFunc(scalars(Step{Step: 1, Loss: Absent, GradNorm: norm}),
			func(s scalar) bool { return s.tag == "loss_metrics/global_avg_loss" })
		if drawn != want {
			t.Errorf("gradient norm %v: a loss is drawn: %v", norm, drawn)
		}
	}
}
