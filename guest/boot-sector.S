# A boot sector that reports to the first serial port. It prints a line, which shows that the BIOS has read
# it. Then it reads the second sector through the BIOS's disk services, and prints the text there up to a zero
# byte.

        .code16
        .globl  _start
_start:
        cli
        xorw    %ax, %ax
        movw    %ax, %ds
        movw    %ax, %es
        movw    %ax, %ss
        movw    $0x7c00, %sp
        sti
        cld
        movb    %dl, drive

        movw    $hello, %si
        call    print

        movb    $0x42, %ah              # extended read: DS:SI points to the packet
        movb    drive, %dl
        movw    $packet, %si
        int     $0x13
        movw    $failed, %si
        jc      1f
        movw    $0x7e00, %si
1:      call    print
        movw    $newline, %si
        call    print
2:      hlt
        jmp     2b

# Prints the text at SI on COM1. Waits before each byte until the transmitter is empty.
print:
        lodsb
        testb   %al, %al
        jz      2f
        movb    %al, %bl
        movw    $0x3fd, %dx
1:      inb     %dx, %al
        testb   $0x20, %al
        jz      1b
        movw    $0x3f8, %dx
        movb    %bl, %al
        outb    %al, %dx
        jmp     print
2:      ret

hello:  .asciz  "\r\nboot sector running\r\n"
failed: .asciz  "second sector: read failed"
newline: .asciz "\r\n"
drive:  .byte   0

        .balign 4
packet: .byte   16, 0                   # its length
        .word   1                       # sectors
        .word   0x7e00, 0               # to offset, segment
        .quad   1                       # from sector 1

        .org    510
        .word   0xaa55
