// Package bench measures: attention over ranks, transfers, single operations, and training
// steps, on whatever device a rank has, and shows what it found as tables and JSON.
//
// Figures are medians over iterations by the device's own clock, of the rank that was slowest.
package bench
