package readable

import (
	"math"
	"testing"
	"time"
)

func TestNumbers(t *testing.T) {
	for got, want := range map[string]string{
		Number(0): "0", Number(0.0123456): "0.0123", Number(8): "8", Number(12.5): "12.5", Number(-1234567.8): "-1,234,568",
		Number(1e-9): "1.00e-09", Number(math.NaN()): "", Number(math.Inf(1)): "",
		Count(999): "999", Count(-1000): "-1,000", Count(1 << 52): "4,503,599,627,370,496",
		Count(math.MinInt64): "-9,223,372,036,854,775,808",
		Short(999):           "999", Short(4070): "4,070", Short(12_340): "12.3K", Short(3.2128e9): "3.21B",
		Short(5e15):        "5,000T",
		Bytes(int64(1023)): "1,023 B", Bytes(31.9 * (1 << 20)): "31.9 MiB", Bytes(int64(1) << 52): "4,096 TiB",
		Size(int64(131072)): "128K", Size(1000.0): "1000", Size(int64(3) << 29): "1,536M", Size(int64(1) << 30): "1G",
		Seconds(0): "0 s", Seconds(12.3e-6): "12.3 µs", Seconds(0.5): "500 ms", Seconds(59.96): "60 s",
		Seconds(125):   "2 min 05 s",
		Seconds(864e9): "10,000,000 days", Seconds(9e6): "2500 h 00 min",
		Seconds(7300): "2 h 01 min", Duration(48 * time.Second): "48s", Duration(83 * time.Second): "1m23s",
		Duration(125 * time.Minute): "2h05m", Duration(76 * time.Hour): "3d04h", Duration(-time.Second): "0s",
		Duration(59600 * time.Millisecond): "1m00s",
		Rate(5312.4):                       "5,312 tok/s", Rate(9.9): "9.9 tok/s", Rate(9.96): "10 tok/s",
		Rate(1e300): "1,000,000,000,000,000,000 tok/s", Rate(-1): "? tok/s", Rate(0): "0.0 tok/s",
		Rate(math.NaN()): "? tok/s", Percent(0.1234): "12.3%",
		Percent(0.001): "0.10%", Percent(math.NaN()): "",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
