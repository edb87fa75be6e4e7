package source

import (
	"fmt"
	"reflect"
	"regexp"
	"strings"
	"testing"
)

// params lists the structs of Go with their C file and C name.
var params = []struct {
	file, name string
	fill       any
}{
	{"flash.cuh", "Strided", Strided{}},
	{"flash.cuh", "Tile", FlashTile{}},
	{"flash.cuh", "FlashParams", FlashParams{}},
	{"hopper_forward.cu", "TensorMap", TensorMap{}},
	{"hopper_forward.cu", "HopperForward", HopperForward{}},
	{"hopper_backward.cu", "HopperBackward", HopperBackward{}},
	{"hopper_group.cu", "HopperGroup", HopperGroup{}},
	{"reference.cu", "Strided", Strided{}},
	{"reference.cu", "Tile", ReferenceTile{}},
	{"reference.cu", "Params", ReferenceParams{}},
	{"attention_common.cu", "Strided", Strided{}},
	{"attention_common.cu", "Rows", Rows{}},
	{"attention_common.cu", "Words", Words{}},
	{"attention_sink.cu", "Strided", Strided{}},
	{"attention_sink.cu", "SinkParams", SinkParams{}},
	{"fused.cu", "Strides", FusedStrides{}},
	{"fused.cu", "Part", FusedPart{}},
	{"fused.cu", "Merge", FusedMerge{}},
	{"fused.cu", "Sum", FusedSum{}},
	{"fused.cu", "Sums", FusedSums{}},
	{"fused.cu", "Lse", FusedLSE{}},
	{"gemm_simple.cu", "Matrix<float>", Matrix{}},
	{"ops_conv.cu", "ConvRows", ConvRows{}},
	{"ops_conv.cu", "ConvSegment", ConvSegment{}},
	{"ops_conv.cu", "Conv", Conv{}},
	{"delta.cu", "Segment", DeltaSegment{}},
	{"delta.cu", "DeltaParams", DeltaParams{}},
	{"delta.cu", "DeltaMaps", DeltaMaps{}},
	{"ops_copy.cu", "Layout", Layout{}},
	{"ops_draw.cu", "Strips", Strips{}},
	{"ops_draw.cu", "Normals", Normals{}},
	{"ops_embed.cu", "Keys", Keys{}},
	{"ops_experts.cu", "Pairs", Pairs{}},
	{"ops_experts.cu", "Router", Router{}},
	{"ops_optim.cu", "Step", AdamStep{}},
	{"ops_rope.cu", "Rope", Rope{}},
	{"ops_scaled.cu", "Quantize", Quantize{}},
}

// layoutChecks returns C++ that compiles only if the structs of a file equal those of Go in size and alignment, and
// every field in offset, size and, for numbers, type.
func layoutChecks(file string) string {
	var b strings.Builder
	b.WriteString(`
#define OFFSET(S, F) __INTADDR__(&((S*)0)->F) // NVRTC has no offsetof
template <class A, class B> struct Same { static constexpr bool yes = false; };
template <class A> struct Same<A, A> { static constexpr bool yes = true; };
template <class A> struct Pointer { static constexpr bool yes = false; };
template <class A> struct Pointer<A*> { static constexpr bool yes = true; };
template <class A> struct Element { typedef A Type; };
template <class A, int N> struct Element<A[N]> { typedef A Type; };
`)
	for _, p := range params {
		if p.file != file {
			continue
		}
		t := reflect.TypeOf(p.fill)
		check := func(format string, args ...any) {
			condition := fmt.Sprintf(format, args...)
			fmt.Fprintf(&b, "static_assert(%s, %q);\n", condition, t.Name()+": "+condition)
		}
		check("sizeof(%s) == %d", p.name, t.Size())
		check("alignof(%s) == %d", p.name, align(t))
		for f := range fields(t) {
			c := snake(f.Name)
			check("OFFSET(%s, %s) == %d", p.name, c, f.Offset)
			check("sizeof(%s::%s) == %d", p.name, c, f.Type.Size())
			element := f.Type
			if element.Kind() == reflect.Array {
				element = element.Elem()
			}
			of := fmt.Sprintf("Element<decltype(%s::%s)>::Type", p.name, c)
			switch element.Kind() {
			case reflect.Uint64:
				if t != reflect.TypeFor[TensorMap]() {
					check("Pointer<%s>::yes", of)
				}
			case reflect.Struct: // has checks of its own
			default:
				check("Same<%s, %s>::yes", of, numbers[element.Kind()])
			}
		}
	}
	return b.String()
}

// align returns the alignment of a struct in C. For a struct with a tensor map, it is larger than in Go.
func align(t reflect.Type) int {
	if t == reflect.TypeFor[TensorMap]() {
		return MapAlign
	}
	most := t.Align()
	for f := range fields(t) {
		if f.Type.Kind() == reflect.Struct {
			most = max(most, align(f.Type))
		}
	}
	return most
}

// numbers maps kinds of Go to types of C.
var numbers = map[reflect.Kind]string{
	reflect.Int32: "int", reflect.Uint32: "unsigned", reflect.Int64: "long long", reflect.Float32: "float",
	reflect.Float64: "double",
}

func fields(t reflect.Type) func(func(reflect.StructField) bool) {
	return func(yield func(reflect.StructField) bool) {
		for i := range t.NumField() {
			if !yield(t.Field(i)) {
				return
			}
		}
	}
}

var word = regexp.MustCompile(`([a-z0-9])([A-Z])|([A-Z])([A-Z][a-z])`)

// snake returns the name of a field in C: tile_count for TileCount, kv_heads for KVHeads.
func snake(name string) string {
	return strings.ToLower(word.ReplaceAllString(name, "${1}${3}_${2}${4}"))
}

func TestSnake(t *testing.T) {
	for name, want := range map[string]string{"TileCount": "tile_count", "KVHeads": "kv_heads", "SeqQ": "seq_q",
		"LSE": "lse", "LSEAt": "lse_at", "Src0": "src0"} {
		if got := snake(name); got != want {
			t.Errorf("snake(%s) = %s, want %s", name, got, want)
		}
	}
}

// TestParamsHaveNoGaps checks that fields have no gaps. Then equal offsets and sizes exclude a field that only C has.
func TestParamsHaveNoGaps(t *testing.T) {
	for _, p := range params {
		end, s := uintptr(0), reflect.TypeOf(p.fill)
		for f := range fields(s) {
			if f.Offset != end {
				t.Errorf("%s: there is a gap before %s", s.Name(), f.Name)
			}
			end = f.Offset + f.Type.Size()
		}
		if end != s.Size() {
			t.Errorf("%s: there is a gap at the end", s.Name())
		}
	}
}

// A struct beside some addresses fits into cuda.Args.
func TestParamsFitALaunch(t *testing.T) {
	for _, p := range params {
		if n := reflect.TypeOf(p.fill).Size(); n > 4096-256 {
			t.Errorf("%s of %s has %d bytes, of 4096 for all parameters", p.name, p.file, n)
		}
	}
}
